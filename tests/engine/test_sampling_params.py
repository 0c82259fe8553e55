import math
import pickle

import pytest

from engine import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", 7),
        ("stop_token_ids", [1, -1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 1),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", "yes"),
        ("n", 0),
        ("n", 1025),
        ("n", True),
        ("best_of", 0),
        ("best_of", 1.0),
        ("beam_width", 0),
        ("beam_width", 65),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "high"),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("bad_words", "word"),
        ("bad_words", ["word", ""]),
        ("bad_words", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 7),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("length_penalty", math.nan),
        ("length_penalty", 10.5),
        ("early_stopping", "always"),
        ("early_stopping", 1),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert refused.value.code == "invalid_request"
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("best_of", {"n": 3, "best_of": 2}),
        ("n", {"n": 2, "temperature": 0}),
        ("best_of", {"best_of": 2, "temperature": 0}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("n", {"n": 3, "beam_width": 2, "temperature": 0}),
        ("temperature", {"beam_width": 2, "temperature": 0.5}),
        ("temperature", {"beam_width": 2}),
        ("top_k", {"beam_width": 2, "temperature": 0, "top_k": 5}),
        ("top_p", {"beam_width": 2, "temperature": 0, "top_p": 0.5}),
        ("min_p", {"beam_width": 2, "temperature": 0, "min_p": 0.1}),
        ("best_of", {"beam_width": 2, "temperature": 0, "best_of": 2}),
        ("stop", {"beam_width": 2, "temperature": 0, "stop": "x"}),
        ("logprobs", {"beam_width": 2, "temperature": 0, "logprobs": 0}),
        ("length_penalty", {"length_penalty": 2.0}),
        ("early_stopping", {"early_stopping": True}),
        ("early_stopping", {"early_stopping": "never"}),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(field, params):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**params)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"n": 2, "best_of": 2},
        {"n": 1, "best_of": 1, "temperature": 0},
        {"n": 2, "beam_width": 2, "temperature": 0, "length_penalty": -1.0, "early_stopping": "never"},
        {"beam_width": 3, "temperature": 0, "top_k": -1, "stop": [], "min_tokens": 3, "repetition_penalty": 1.2},
        {"logit_bias": dict.fromkeys(range(1024), -100)},
        {"logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_parameters_that_suit_each_other_are_taken(params):
    SamplingParams(**params)


def test_parameters_are_hashable_and_survive_a_pipe():
    params = SamplingParams(logit_bias={1: 2.0}, stop=("a",), bad_words=("b",))
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop=("a",), bad_words=("b",)))
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().max_tokens = 3


@pytest.mark.parametrize(("stop", "strings"), [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ())])
def test_stop_may_be_one_string_or_several(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"min_p": 0}, {"max_tokens": None}])
def test_values_that_mean_off_are_taken(off):
    SamplingParams(**off)
