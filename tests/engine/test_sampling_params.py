import math

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
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert refused.value.code == "invalid_request"
    assert field in str(refused.value)


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
