"""What pools: the parameters, the sums over chunks, and decoders that give vectors instead of tokens."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from engine import LLM, EngineConfig, PoolingParams, RequestError, SamplingParams, TextPair
from engine.device import CpuDevice
from engine.messages import NewRequest
from engine.pooling.intake import PoolingIntake, PoolingModel
from engine.pooling.pooler import Pooler, sigmoid
from engine.pooling.rows import sum_tokens
from tests.engine.asking import AskingProcess
from tests.engine.encoder_fixture import sentence_transformers_files
from tests.engine.models_fixture import tiny_llama
from tests.engine.toy import FaultyRunner, answer, next_token, toy_core, toy_limits, toy_runner

GREEDY = SamplingParams(temperature=0, max_tokens=6)
RAW = PoolingParams(normalize=False)
PROMPTS = [[n % 250 for n in range(7, 7 + length)] for length in (5, 1, 40, 33, 16, 17)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


def make_llm(folder, **options):
    return LLM(str(folder), **{"num_kv_blocks": 65, "block_size": 8, "num_threads": 1, **options})


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def states(folder):
    """Transformers' final hidden states of each of `PROMPTS`."""
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def vectors(outputs):
    assert [output.error for output in outputs] == [None] * len(outputs)
    return np.stack([output.data for output in outputs])


def expected(states, pooling):
    return np.stack([{"mean": s.mean(0), "cls": s[0], "last": s[-1]}[pooling].numpy() for s in states])


# ---- parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", "classify"),
        ("pooling", "max"),
        ("normalize", 1),
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 2.0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", "all"),
    ],
)
def test_a_bad_parameter_is_named(field, value):
    with pytest.raises(RequestError, match=field) as caught:
        PoolingParams(**{field: value})
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        ("score", "pooling", "mean"),
        ("score", "normalize", False),
        ("score", "dimensions", 3),
        ("embed", "use_activation", True),
    ],
)
def test_a_parameter_of_the_other_task_is_refused(task, field, value):
    with pytest.raises(RequestError) as caught:
        PoolingParams(task=task, **{field: value})
    assert caught.value.field == field


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="dimension"):
        PoolingParams(dimension=3)


# ---- sums


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8])
def test_a_vector_is_the_same_over_any_chunks(pooling, chunk):
    states = torch.arange(28.0).view(7, 4) ** 2
    pooler = Pooler(pooling)
    for start in range(0, 7, chunk):
        part = states[start : start + chunk]
        pooler.add(sum_tokens(part, [pooler.wanted(start, len(part), 7)], CpuDevice())[0].numpy())
    np.testing.assert_allclose(pooler.vector(7), expected([states], pooling)[0], rtol=1e-6)


def test_a_prompt_computed_again_counts_once():
    pooler = Pooler("mean")
    for _ in range(2):
        pooler.reset()
        pooler.add(np.array([2, 4], np.float32))
    assert pooler.vector(2).tolist() == [1, 2]


def test_sums_of_several_rows_and_of_none():
    hidden = torch.arange(12.0).view(6, 2)
    sums = sum_tokens(hidden, [range(4, 6), range(3, 3), range(1)], CpuDevice())
    assert sums.tolist() == [[18, 20], [0, 0], [0, 1]]
    assert sum_tokens(hidden.bfloat16(), [range(2)], CpuDevice()).dtype == torch.float32


def test_dimensions_are_cut_off_before_the_length_is_made_one():
    pooler = Pooler("last", normalize=True, dimensions=2)
    pooler.add(np.array([3, 4, 12], np.float32))
    np.testing.assert_allclose(pooler.vector(1), [0.6, 0.8], rtol=1e-6)


def test_a_vector_of_zeros_stays_one():
    pooler = Pooler("last", normalize=True)
    pooler.add(np.zeros(3, np.float32))
    assert pooler.vector(1).tolist() == [0, 0, 0]


def test_the_sigmoid_of_large_logits_overflows_nowhere():
    logits = np.array([-1e4, -2, 0, 1, 1e4], np.float32)
    with np.errstate(all="raise"):
        values = sigmoid(logits)
    np.testing.assert_allclose(values, [0, 1 / (1 + math.exp(2)), 0.5, 1 / (1 + math.exp(-1)), 1], atol=1e-7)


# ---- the loop, on the toy model: its hidden state is one number


def toy_pooling_core(limits, **options):
    model = PoolingModel(task="embed", size=1, pooling="last", normalize=False)
    pooling = PoolingIntake(model, None, vocab_size=260, max_length=limits.max_model_len)
    return toy_core(limits, pooling=pooling, **options)


def drain(core):
    outputs = {}
    while core.has_unfinished:
        for output in core.step():
            outputs[output.index] = output
        core.scheduler.check_integrity()
    return outputs


def toy_vector(prompt, pooling):
    hidden = [next_token(prompt[: n + 1]) for n in range(len(prompt))]
    return {"mean": sum(hidden) / len(hidden), "cls": hidden[0], "last": hidden[-1]}[pooling]


def test_requests_that_pool_and_that_generate_share_steps_and_blocks():
    limits = toy_limits(max_num_seqs=6, num_kv_blocks=17)
    core = toy_pooling_core(limits)
    prompts = [[n, *range(30)] for n in range(9)]
    kinds = ["mean", "cls", "last"]
    core.add_requests(
        NewRequest(n, prompt, GREEDY if n % 2 else PoolingParams(pooling=kinds[n % 3]))
        for n, prompt in enumerate(prompts)
    )
    outputs = drain(core)
    for n, prompt in enumerate(prompts):
        if n % 2:
            assert list(outputs[n].outputs[0].token_ids) == answer(prompt, 6)
        else:
            assert outputs[n].data.tolist() == [pytest.approx(toy_vector(prompt, kinds[n % 3]))]
    assert core.stats().generated_tokens == sum(len(answer(prompts[n], 6)) for n in range(1, 9, 2))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_preempted_prompt_is_pooled_once(pooling):
    core = toy_pooling_core(toy_limits(max_num_batched_tokens=4, num_kv_blocks=36))
    # Three older requests generate more than is expected of them, and so take the blocks of a prompt of which each
    # step computes a token.
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    core.add_requests(NewRequest(n, [n], params) for n in range(3))
    prompt = list(range(44))
    core.add_requests([NewRequest(3, prompt, PoolingParams(pooling=pooling))])
    outputs = drain(core)
    assert outputs[3].data.tolist() == [pytest.approx(toy_vector(prompt, pooling))]
    assert core.stats().preemptions > 0


def test_the_prefix_cache_is_read_where_only_the_last_token_is_wanted():
    core = toy_pooling_core(toy_limits())
    prompt = list(range(20))
    for index, pooling in enumerate(["mean", "mean", "cls", "last"]):
        core.add_requests([NewRequest(index, prompt, PoolingParams(pooling=pooling))])
        (output,) = drain(core).values()
        assert output.data.tolist() == [pytest.approx(toy_vector(prompt, pooling))]
        assert output.num_cached_tokens == (16 if pooling == "last" else 0)


def test_a_prompt_may_fill_the_whole_context_when_nothing_is_generated():
    core = toy_pooling_core(toy_limits(max_model_len=20, num_kv_blocks=6))
    core.add_requests([NewRequest(0, [1] * 20, RAW), NewRequest(1, [1] * 21, RAW), NewRequest(2, [1] * 20, GREEDY)])
    outputs = drain(core)
    assert outputs[0].error is None
    assert [outputs[n].error.code for n in (1, 2)] == ["context_length_exceeded"] * 2


def test_steps_that_do_not_fit_the_memory_are_tried_again_smaller():
    limits = toy_limits()
    core = toy_pooling_core(limits, runner=FaultyRunner(toy_runner(limits), lambda plan: plan.num_tokens <= 4))
    core.add_requests([NewRequest(0, list(range(30)), PoolingParams(pooling="mean"))])
    assert drain(core)[0].data.tolist() == [pytest.approx(toy_vector(list(range(30)), "mean"))]


def test_a_request_is_aborted_before_and_after_it_has_begun():
    core = toy_pooling_core(toy_limits(max_num_seqs=1))
    core.add_requests(NewRequest(n, [n] * 30, PoolingParams(pooling="mean")) for n in range(3))
    core.step()
    core.abort(0)
    core.abort(2)
    outputs = drain(core)
    assert [outputs[n].error and outputs[n].error.code for n in range(3)] == ["aborted", None, "aborted"]
    assert outputs[0].data.shape == (0,)


def test_hidden_states_that_are_not_numbers_fail_their_request():
    class NanRunner(FaultyRunner):
        def execute(self, plan):
            output = super().execute(plan)
            broken = {index: vector * np.float32("nan") for index, vector in output.pooled.items() if index == 1}
            return output._replace(pooled={**output.pooled, **broken})

    limits = toy_limits()
    core = toy_pooling_core(limits, runner=NanRunner(toy_runner(limits), lambda plan: True))
    core.add_requests(NewRequest(n, [n] * 3, RAW) for n in range(3))
    outputs = drain(core)
    assert [outputs[n].error and outputs[n].error.code for n in range(3)] == [None, "nan_hidden_states", None]


def test_a_loop_that_pools_nothing_says_so():
    core = toy_core()
    core.add_requests([NewRequest(0, [1, 2], RAW)])
    assert drain(core)[0].error.code == "unsupported_task"


# ---- decoders


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_decoder_embeds_as_transformers_does(llm, states, pooling):
    outputs = llm.embed(PROMPTS, PoolingParams(pooling=pooling, normalize=False))
    np.testing.assert_allclose(vectors(outputs), expected(states, pooling), rtol=0, atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("caching", [False, True])
def test_chunks_of_16_tokens_and_cached_prefixes_change_nothing(folder, states, pooling, caching):
    llm = make_llm(folder, max_num_batched_tokens=16, enable_prefix_caching=caching)
    params = PoolingParams(pooling=pooling, normalize=False)
    for _ in range(2):
        outputs = llm.embed(PROMPTS, params)
        np.testing.assert_allclose(vectors(outputs), expected(states, pooling), rtol=0, atol=2e-5)
    hits = [output.num_cached_tokens for output in outputs]
    assert max(hits) == (32 if caching and pooling == "last" else 0)


def test_a_decoders_vector_is_by_default_that_of_the_last_token_normalised(llm, states):
    last = expected(states, "last")
    normalised = last / np.linalg.norm(last, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(llm.embed(PROMPTS)), normalised, atol=1e-5)
    assert llm.info.tasks == ("generate", "embed")


def test_embedding_leaves_generation_as_it_was(llm):
    before = [output.outputs for output in llm.generate(PROMPTS, GREEDY)]
    embeddings = llm.embed(iter(PROMPTS * 3))
    next(embeddings)
    assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == before
    assert len(list(embeddings)) == 3 * len(PROMPTS) - 1


def test_sentence_transformers_files_decide_for_a_decoder_too(tmp_path, states):
    tiny_llama(tmp_path, tokenizer=True)
    sentence_transformers_files(tmp_path, pooling={"pooling_mode_mean_tokens": True}, max_seq_length=12)
    llm = make_llm(tmp_path)
    np.testing.assert_allclose(vectors(llm.embed(PROMPTS)), expected(states, "mean"), atol=2e-5)
    (cut,) = llm.embed(["a text of more than twelve bytes"], PoolingParams(truncate_prompt_tokens=-1))
    assert len(cut.prompt_token_ids) == 12


@pytest.mark.parametrize("named_as", ["LlamaModel", "LlamaForCausalLM"])
def test_a_body_without_its_head_embeds_as_with_it(tmp_path, folder, llm, named_as):
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors"), "saved without the body's prefix"
    path = tmp_path / "config.json"
    tied = named_as == "LlamaForCausalLM"
    config = {**json.loads(path.read_text()), "architectures": [named_as], "tie_word_embeddings": tied}
    path.write_text(json.dumps(config))
    headless = make_llm(tmp_path)
    np.testing.assert_allclose(vectors(headless.embed(PROMPTS)), vectors(llm.embed(PROMPTS)), rtol=0, atol=1e-5)
    assert headless.info.tasks == (("generate", "embed") if tied else ("embed",))
    (answered,) = headless.generate([[1, 2]], GREEDY)
    assert (answered.error and answered.error.code) == (None if tied else "unsupported_task")


def test_a_decoder_embeds_text_and_conversations_and_scores_by_cosine(llm):
    conversation = [{"role": "user", "content": "hi"}]
    text, chat = llm.embed(["hi", conversation])
    assert list(text.prompt_token_ids) == llm.tokenizer("hi")["input_ids"]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(chat.prompt_token_ids) == llm.tokenizer(rendered)["input_ids"]
    (score,) = llm.score("hi", "hi")
    assert score.score == pytest.approx(1, abs=1e-6)


def test_bad_rows_come_back_in_their_places_with_their_errors(llm):
    prompts = ["good", "", [10_000], [1] * 600, TextPair("a", "b"), "good"]
    outputs = llm.embed(prompts)
    assert [output.error and output.error.code for output in outputs] == [
        None,
        "invalid_request",
        "invalid_request",
        "context_length_exceeded",
        "invalid_request",
        None,
    ]
    (wide,) = llm.embed(["good"], PoolingParams(dimensions=65))
    assert wide.error.field == "dimensions"
    (adapted,) = llm.embed(["good"], lora="an-adapter")
    assert adapted.error.field == "lora"
    (score,) = llm.score("a", "b", PoolingParams(task="score"))
    assert score.error.code == "unsupported_task"


def test_an_engine_process_gives_what_the_engine_here_gives(folder, llm):
    process = AskingProcess(EngineConfig(str(folder), num_kv_blocks=65, block_size=8, num_threads=1))
    assert process.start().tasks == ("generate", "embed")
    futures = [process.ask(prompt, PoolingParams()) for prompt in PROMPTS]
    bad = process.ask([10_000], PoolingParams())
    answered = process.ask(PROMPTS[0], GREEDY)
    results = [future.result(60) for future in futures]
    np.testing.assert_allclose(vectors(results), vectors(llm.embed(PROMPTS)), atol=1e-6)
    assert bad.result(60).error.code == "invalid_request"
    assert answered.result(60).outputs == llm.generate([PROMPTS[0]], GREEDY)[0].outputs
    process.stop()
