"""Adapters in the engine: the same tokens as Transformers gives with the adapter merged, in whatever company."""

import shutil
from pathlib import Path

import pytest

from engine import LLM, ConfigError, EngineConfig, SamplingParams
from tests.engine.families import FAMILY_CASES, SMALL, random_model
from tests.engine.lora_fixture import (
    ATTENTION,
    edit,
    greedy,
    merged,
    transformers_model,
    write_adapter,
)
from tests.engine.models_fixture import tiny_llama
from tests.engine.test_loader_gguf import write_gguf

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [200, 7, 7], [42, 17, 99, 3, 12]]
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
PEFT_ADAPTER = Path(__file__).parents[1] / "data" / "peft_adapter"


def engine(base, **options):
    options = {"num_kv_blocks": 128, "block_size": 4, "max_num_seqs": 8, "max_loras": 4, **options}
    return LLM(str(base), dtype="float32", device="cpu", **options)


def answers(llm, prompts, lora=None, params=GREEDY):
    outputs = llm.generate(prompts, params, lora=lora)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two query heads to a KV head, so that the slices of the fused projection differ in size."""
    return tiny_llama(tmp_path_factory.mktemp("base"), tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(folder / "all", base, seed=1),
        "attention": write_adapter(folder / "attention", base, seed=2, linears=ATTENTION, r=16, lora_alpha=24),
        "two": write_adapter(folder / "two", base, seed=3, linears=("v_proj", "up_proj"), r=1, lora_alpha=3),
    }


SCALING = {"all": 2.0, "attention": 1.5, "two": 3.0}


@pytest.fixture(scope="module")
def llm(base):
    return engine(base)


@pytest.fixture(scope="module")
def expected(base, adapters):
    models = {name: merged(base, path, SCALING[name]) for name, path in adapters.items()}
    models[None] = transformers_model(base)
    return {name: greedy(model, PROMPTS, MAX_TOKENS) for name, model in models.items()}


@pytest.mark.parametrize("name", SCALING)
def test_an_adapter_gives_the_tokens_of_the_merged_weights(llm, adapters, expected, name):
    assert answers(llm, PROMPTS, str(adapters[name])) == expected[name]
    assert all(with_adapter != without for with_adapter, without in zip(expected[name], expected[None], strict=True))


@pytest.mark.parametrize("family", ["llama", "llama, biases", "qwen2", "phi3", "gemma2", "qwen3 moe, dense layers"])
def test_it_does_so_for_every_shape_of_model(tmp_path, family):
    # Odd heads, biases, projections that the checkpoint joins, gates of another kind, experts between dense layers.
    case = FAMILY_CASES[family]
    base = tmp_path / "base"
    random_model(case.config(**{**SMALL, **case.fields})).save_pretrained(base)
    adapter = write_adapter(tmp_path / "adapter", base, seed=5)
    with_adapter = greedy(merged(base, adapter, 2.0), PROMPTS, MAX_TOKENS)
    assert answers(engine(base, model_impl="native"), PROMPTS, str(adapter)) == with_adapter
    assert with_adapter != greedy(transformers_model(base), PROMPTS, MAX_TOKENS)


def test_a_batch_that_mixes_adapters_and_none_answers_each_as_alone(llm, adapters, expected):
    names = [None, *SCALING]
    prompts, loras, wanted = [], [], []
    for index, prompt in enumerate(PROMPTS):
        for name in names:
            prompts.append(prompt)
            loras.append(name and str(adapters[name]))
            wanted.append(expected[name][index])
    assert answers(llm, prompts, loras) == wanted


def test_a_row_with_an_adapter_is_the_same_to_the_bit_in_bfloat16_alone_and_in_company(base, adapters):
    llm = LLM(str(base), dtype="bfloat16", device="cpu", num_kv_blocks=128, max_num_seqs=8, max_loras=3)
    loras = [None, *map(str, adapters.values())]
    alone = [answers(llm, [prompt], lora)[0] for prompt in PROMPTS for lora in loras]
    prompts = [prompt for prompt in PROMPTS for _ in loras]
    assert answers(llm, prompts, loras * len(PROMPTS)) == alone


def test_an_adapter_fits_the_same_model_from_a_gguf_file(base, adapters, expected, tmp_path):
    # There the rows of query and key stand in another order than the adapter's.
    llm = engine(write_gguf(tmp_path / "model.gguf", base))
    assert answers(llm, PROMPTS, str(adapters["all"])) == expected["all"]


def test_rank_stabilised_scaling_is_alpha_by_the_root_of_the_rank(base, tmp_path):
    adapter = write_adapter(tmp_path, base, seed=6, r=2, use_rslora=True)
    model = merged(base, adapter, 8 / 2**0.5)
    assert answers(engine(base), PROMPTS, str(adapter)) == greedy(model, PROMPTS, MAX_TOKENS)


def test_rank_and_alpha_patterns_say_what_differs_by_module(base, tmp_path):
    adapter = write_adapter(
        tmp_path,
        base,
        seed=7,
        ranks={"self_attn.q_proj": 8, "mlp.down_proj": 2},
        rank_pattern={"q_proj": 8, r"layers\.\d\.mlp\.down_proj": 2},
        alpha_pattern={"down_proj": 4, "model.layers.1.self_attn.o_proj": 1},
    )
    scalings = {"": 2.0, "q_proj": 1.0, "down_proj": 2.0, "layers.1.self_attn.o_proj": 0.25}
    model = merged(base, adapter, scalings)
    assert answers(engine(base), PROMPTS, str(adapter)) == greedy(model, PROMPTS, MAX_TOKENS)


def test_a_folder_that_peft_itself_has_written_is_read_as_peft_reads_it(base):
    # r=8, lora_alpha=12, rsLoRA, rank_pattern {"q_proj": 2, "layers\.1\.mlp\.down_proj": 5}, alpha_pattern
    # {"model.layers.0.self_attn.v_proj": 40}, all-linear; PEFT's own forward pass gave the tokens of these scalings.
    scalings = {
        "": 12 / 8**0.5,
        "q_proj": 12 / 2**0.5,
        "layers.1.mlp.down_proj": 12 / 5**0.5,
        "layers.0.self_attn.v_proj": 40 / 8**0.5,
    }
    model = merged(base, PEFT_ADAPTER, scalings)
    assert answers(engine(base), PROMPTS, str(PEFT_ADAPTER)) == greedy(model, PROMPTS, MAX_TOKENS)


def test_max_loras_of_one_serves_three_adapters_and_reads_each_again_when_it_was_evicted(base, adapters, expected):
    llm = engine(base, max_loras=1)
    names = list(SCALING) * len(PROMPTS)
    wanted = [expected[name][index // 3] for index, name in enumerate(names)]
    prompts = [PROMPTS[index // 3] for index in range(len(names))]
    assert answers(llm, prompts, [str(adapters[name]) for name in names]) == wanted
    assert llm.stats().lora_loads == 3
    answers(llm, PROMPTS, str(adapters["two"]))
    assert llm.stats().lora_loads == 3
    answers(llm, PROMPTS, str(adapters["all"]))
    assert llm.stats().lora_loads == 4


def cached(llm, prompt, lora):
    (output,) = llm.generate([prompt], GREEDY, lora=lora)
    assert output.error is None
    return output.num_cached_tokens


def test_blocks_are_shared_within_an_adapter_and_never_across(base, adapters):
    llm = engine(base)
    prompt = list(range(1, 18))
    for lora in (None, str(adapters["all"]), str(adapters["two"])):
        assert cached(llm, prompt, lora) == 0
        assert cached(llm, prompt, lora) == 16


def test_one_adapter_under_two_names_shares_blocks_and_a_changed_file_does_not(base, adapters, tmp_path):
    llm = engine(base)
    prompt = list(range(1, 18))
    copy = Path(shutil.copytree(adapters["all"], tmp_path / "copy"))
    assert cached(llm, prompt, str(adapters["all"])) == 0
    assert cached(llm, prompt, str(copy)) == 16
    before = answers(llm, PROMPTS, str(copy))
    edit(copy, lora_alpha=80)
    assert cached(llm, prompt, str(copy)) == 0
    assert llm.stats().lora_loads == 3
    assert answers(llm, PROMPTS, str(copy)) != before


def test_continuations_of_one_request_all_have_its_adapter(llm, adapters):
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
    lora = str(adapters["all"])
    (alone,) = llm.generate([PROMPTS[0]], params, lora=lora)
    (plain,) = llm.generate([PROMPTS[0]], params)
    mixed = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[0]], params, lora=[str(adapters["two"]), lora, None])
    assert len({completion.token_ids for completion in alone.outputs}) == 3
    assert mixed[1].outputs == alone.outputs
    assert mixed[2].outputs == plain.outputs != alone.outputs


def test_preempted_requests_go_on_with_their_adapters(base, adapters, expected):
    llm = engine(base, num_kv_blocks=13, max_model_len=40, max_loras=2)
    names = list(SCALING) * 2
    prompts = [PROMPTS[index % 3] for index in range(6)]
    wanted = [expected[name][index % 3] for index, name in enumerate(names)]
    assert answers(llm, prompts, [str(adapters[name]) for name in names]) == wanted
    assert llm.stats().preemptions > 0


def test_the_adapters_of_chat_and_of_an_iterator_are_one_for_all_or_one_for_each(llm, adapters):
    loras = [str(adapters["all"]), None]
    conversation = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([conversation, conversation], GREEDY, lora=loras)
    streamed = list(llm.generate(iter([conversation, conversation]), GREEDY, lora=iter(loras)))
    assert [output.outputs for output in outputs] == [output.outputs for output in streamed]
    assert outputs[0].outputs != outputs[1].outputs
    with pytest.raises(ValueError, match="3 prompts, but 2 adapters"):
        llm.generate(PROMPTS, GREEDY, lora=loras)


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_alone(llm, adapters, expected, tmp_path):
    loras = [str(tmp_path / "nothing"), str(adapters["all"]), None, str(tmp_path / "nothing")]
    outputs = llm.generate([PROMPTS[0]] * 4, GREEDY, lora=loras)
    assert [output.error and (output.error.code, output.error.field) for output in outputs] == [
        ("lora_not_found", "lora"),
        None,
        None,
        ("lora_not_found", "lora"),
    ]
    assert outputs[0].outputs[0].finish_reason == "error"
    assert list(outputs[1].outputs[0].token_ids) == expected["all"][0]
    assert list(outputs[2].outputs[0].token_ids) == expected[None][0]


@pytest.mark.parametrize("name", ["", 7])
def test_a_name_that_is_none_is_refused(llm, name):
    (output,) = llm.generate([PROMPTS[0]], GREEDY, lora=[name])
    assert (output.error.code, output.error.field) == ("invalid_lora", "lora")


def test_an_engine_without_max_loras_refuses_adapters(base, adapters):
    llm = engine(base, max_loras=0)
    (output,) = llm.generate([PROMPTS[0]], GREEDY, lora=str(adapters["all"]))
    assert (output.error.code, output.error.field) == ("invalid_lora", "lora")
    assert "max_loras" in str(output.error)


def test_a_model_that_runs_by_transformers_code_takes_no_adapters(base):
    with pytest.raises(ConfigError, match="Transformers' own code"):
        engine(base, model_impl="transformers")


def test_options_out_of_range_are_refused():
    for options in ({"max_loras": -1}, {"max_lora_rank": 0}, {"max_lora_rank": 257}):
        with pytest.raises(ConfigError, match="max_lora"):
            EngineConfig("m", **options)


def test_memory_for_the_adapters_is_left_free(base, monkeypatch):
    monkeypatch.setattr("engine.memory.available_memory", lambda: 4 * 2**20)
    options = {"num_kv_blocks": None, "max_num_seqs": 64, "max_lora_rank": 64}
    without, with_adapters = (engine(base, max_loras=count, **options).info.num_kv_blocks for count in (0, 2))
    # Per layer: q, o 64+64, k, v 64+32, gate, up, down 64+96, of rank 64 in float32; blocks of 4 tokens hold 1 KiB.
    adapter = 2 * (2 * 128 + 2 * 96 + 3 * 160) * 64 * 4
    block = 2 * 2 * 2 * 16 * 4 * 4
    assert without - with_adapters == pytest.approx(2 * adapter / 2 / block, abs=1)
