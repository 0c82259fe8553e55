"""Several answers to one prompt: each is what a request of its own would give, and best_of returns the likeliest."""

import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import RequestError
from engine.messages import NewRequest
from engine.sampling.seeds import choice_seed
from tests.engine.models_fixture import byte_tokenizer, tiny_llama
from tests.engine.toy import VOCAB_SIZE, ToyModel, toy_core, toy_limits, toy_runner

SEED = 20_26


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


def engine(model_path, **options):
    return LLM(str(model_path), dtype="float32", num_threads=1, **options)


def prompts(count, length=21):
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(7)).tolist()


def sampled(**params):
    return SamplingParams(**{"temperature": 0.9, "max_tokens": 15, "seed": SEED, **params})


def answers_alone(llm, prompt, count, **params):
    """What single requests give, each with the seed of one choice."""
    each = [sampled(seed=choice_seed(SEED, choice), **params) for choice in range(count)]
    return [output.outputs[0].token_ids for output in llm.generate([prompt] * count, each)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="room for all"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 16}, id="three seats and chunks"),
        pytest.param({"num_kv_blocks": 13, "block_size": 4, "max_model_len": 48}, id="a pool that preempts"),
        pytest.param({"enable_prefix_caching": False, "block_size": 4}, id="no prefix cache"),
    ],
)
@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="plain"),
        pytest.param({"top_p": 0.9, "stop_token_ids": list(range(0, 300, 20))}, id="stops"),
        pytest.param(
            {"repetition_penalty": 1.3, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {65: 6.0}},
            id="penalties",
        ),
    ],
)
def test_each_of_eight_answers_is_that_of_a_request_with_its_seed(model_path, options, params):
    alone = engine(model_path)
    llm = engine(model_path, **options)
    outputs = llm.generate(prompts(2), sampled(n=8, **params))
    for prompt, output in zip(prompts(2), outputs, strict=True):
        assert [completion.index for completion in output.outputs] == list(range(8))
        answers = [completion.token_ids for completion in output.outputs]
        assert answers == answers_alone(alone, prompt, 8, **params)
        assert len(set(answers)) == 8
    assert (llm.stats().preemptions > 0) == ("num_kv_blocks" in options)
    assert llm.stats().kv_blocks_used == 0


def test_the_prompt_is_computed_once_for_all_answers(model_path):
    llm = engine(model_path, enable_prefix_caching=False)
    llm.generate(prompts(1), sampled(n=8))
    assert llm.stats().prompt_tokens == 21


def test_best_of_returns_the_likeliest_by_token_best_first(model_path):
    llm = engine(model_path)
    stops = {"stop_token_ids": list(range(0, 300, 20))}
    for prompt in prompts(4):
        (all_six,) = llm.generate([prompt], sampled(n=6, logprobs=0, **stops))
        (best_two,) = llm.generate([prompt], sampled(n=2, best_of=6, **stops))
        assert len({len(completion.token_ids) for completion in all_six.outputs}) > 1
        ranked = sorted(
            all_six.outputs,
            key=lambda completion: completion.cumulative_logprob / len(completion.token_ids),
            reverse=True,
        )
        assert [completion.token_ids for completion in best_two.outputs] == [one.token_ids for one in ranked[:2]]
        assert [completion.index for completion in best_two.outputs] == [0, 1]
        assert best_two.outputs[0].logprobs is None
        assert best_two.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob, abs=1e-4)


class Flat(ToyModel):
    """The toy's own next token and 259 others that are nearly as likely."""

    def logits(self, hidden):
        return super().logits(hidden) / 20


def ask(*requests):
    limits = toy_limits()
    core = toy_core(limits, runner=toy_runner(limits, Flat()), tokenizer=byte_tokenizer())
    core.add_requests(NewRequest(index, *request) for index, request in enumerate(requests))
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    return [output for _, output in sorted((output.index, output) for output in outputs)]


def test_bad_words_do_not_occur_in_any_answer():
    letters = [*map(ord, "abc ")]
    allowed = [byte_tokenizer().encode(character)[0] for character in "abc "]
    params = {"allowed_token_ids": allowed, "max_tokens": 50, "n": 8, "seed": 1}
    (free,) = ask(([3], SamplingParams(**params)))
    words = ["ab", "ca c", "bb"]
    assert all(any(word in completion.text for completion in free.outputs) for word in words)
    (ruled,) = ask(([3], SamplingParams(**params, bad_words=words)))
    for completion in ruled.outputs:
        assert set(completion.text.encode()) <= set(letters)
        assert not any(word in completion.text for word in words)


def test_special_tokens_are_written_if_asked_for():
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    params = {"allowed_token_ids": [end], "max_tokens": 3, "temperature": 0}
    silent, written = ask(([3], SamplingParams(**params)), ([3], SamplingParams(**params, skip_special_tokens=False)))
    assert (silent.outputs[0].text, written.outputs[0].text) == ("", "<|im_end|>" * 3)


def test_a_stop_string_may_be_a_special_tokens_name_if_those_are_written():
    end = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    params = {"allowed_token_ids": [end], "max_tokens": 3, "temperature": 0, "stop": "<|im_end|>"}
    silent, written = ask(([3], SamplingParams(**params)), ([3], SamplingParams(**params, skip_special_tokens=False)))
    assert (silent.outputs[0].finish_reason, written.outputs[0].finish_reason) == ("length", "stop")


def test_rules_that_leave_no_token_fail_that_request_alone():
    nothing = SamplingParams(temperature=0, bad_words=["a"], allowed_token_ids=[byte_tokenizer().encode("a")[0]])
    refused, served = ask(([3], nothing), ([4], SamplingParams(max_tokens=2)))
    assert refused.error.code == "no_token_allowed"
    assert served.error is None
    assert len(served.outputs[0].token_ids) == 2


@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias"])
def test_a_token_outside_of_the_vocabulary_is_refused_by_its_field(field):
    value = {VOCAB_SIZE: 1.0} if field == "logit_bias" else [VOCAB_SIZE]
    (output,) = ask(([3], SamplingParams(**{field: value})))
    assert isinstance(output.error, RequestError)
    assert output.error.field == field


def test_bad_words_without_a_tokenizer_are_refused():
    core = toy_core()
    core.add_requests([NewRequest(0, [1], SamplingParams(bad_words=["x"]))])
    (output,) = core.step()
    assert output.error.field == "bad_words"
