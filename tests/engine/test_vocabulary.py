"""Models and tokenizers that do not have the same tokens: logits that only pad, and tokens that only the tokenizer has.

The tokenizer has 260 tokens: the bytes and four special ones. A model of 320 has logits for 60 that are no text, and
a model of 257 none for the last three special tokens, among them the one that ends an answer by the tokenizer.
"""

import pytest

from engine import LLM, PoolingParams, SamplingParams, StructuredOutput
from engine.detokenizer import StopStringWatcher
from tests.engine.models_fixture import tiny_llama

PADDING = 300
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    path = tiny_llama(tmp_path_factory.mktemp("larger"), tokenizer=True, vocab_size=320)
    return LLM(str(path), dtype="float32", num_threads=1, num_kv_blocks=65)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    path = tiny_llama(tmp_path_factory.mktemp("smaller"), tokenizer=True, vocab_size=257, eos_token_id=[255, 258])
    return LLM(str(path), dtype="float32", num_threads=1, num_kv_blocks=65)


def test_padding_may_be_asked_and_answered_and_has_no_text(larger):
    params = {"max_tokens": 3, "logit_bias": {PADDING: 100.0}, "logprobs": 2, "prompt_logprobs": 1}
    for temperature in (0.0, 1.0):
        (output,) = larger.generate([[65, PADDING, 66]], SamplingParams(temperature=temperature, seed=1, **params))
        (completion,) = output.outputs
        assert completion.token_ids == (PADDING,) * 3
        assert completion.text == ""
        assert {(entry.token_id, entry.text, entry.utf8) for entry in completion.logprobs} == {(PADDING, "", b"")}
        assert output.prompt_logprobs[1].token_id == PADDING


def test_padding_inside_a_stop_string_does_not_hide_it(larger):
    a, b = larger.tokenizer("ab")["input_ids"]
    watcher = StopStringWatcher(larger.tokenizer, ["ab"], include_stop=False)
    assert [watcher.push(token_id, may_stop=True) for token_id in (b, a, PADDING, b)] == [None, None, None, "ab"]
    assert watcher.stopped_text == "b"


def test_padding_is_drawn_from_like_any_token_and_only_a_grammar_rules_it_out(larger):
    params = {"allowed_token_ids": list(range(260, 320)), "max_tokens": 8, "seed": 1}
    free, ruled = larger.generate(
        [[1], [1]], [SamplingParams(**params), SamplingParams(**params, structured_output=StructuredOutput(regex="a"))]
    )
    assert len(set(free.outputs[0].token_ids)) > 4
    assert ruled.error.code == "no_token_allowed"


@pytest.mark.parametrize("prompt", ["hi<|im_end|>", [{"role": "user", "content": "hi"}]])
def test_text_with_a_token_that_the_model_lacks_fails_alone(smaller, prompt):
    before, lacking, after = smaller.generate(["a", prompt, "b"], GREEDY)
    assert (lacking.error.code, lacking.error.field) == ("invalid_request", "prompt")
    assert "259" in lacking.error.message
    assert before.error is after.error is None
    embedded, lacking = smaller.embed(["a", prompt], PoolingParams())
    assert embedded.error is None
    assert (lacking.error.code, lacking.error.field) == ("invalid_request", "prompt")


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3},
        {"bad_words": ["<|im_end|>", "a"]},
        {"beam_width": 2, "min_tokens": 2},
        {"structured_output": StructuredOutput(choice=["ab"])},
    ],
)
def test_end_tokens_and_bad_words_that_the_model_lacks_concern_nobody(smaller, params):
    (output,) = smaller.generate(["x"], SamplingParams(temperature=0, max_tokens=4, **params))
    assert output.error is None
    assert output.outputs[0].token_ids


def test_an_end_token_that_the_model_has_still_ends_the_answer(smaller):
    (output,) = smaller.generate(["x"], SamplingParams(temperature=0, max_tokens=4, logit_bias={255: 100.0}))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ((255,), "stop")
