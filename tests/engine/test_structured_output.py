"""What may be asked of an answer's form, before any of it is compiled."""

import pickle

import pytest

from engine.errors import RequestError
from engine.messages import NewRequest
from engine.sampling.params import SamplingParams
from engine.structured.output import StructuredOutput


def test_a_schema_and_its_text_are_the_same_and_keep_the_order_of_their_keys():
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "ä": {"type": "null"}}}
    given = StructuredOutput(json=schema)
    assert given == StructuredOutput(
        json='{"type": "object", "properties":{"z":{"type":"string"},"ä":{"type":"null"}}}'
    )
    assert given != StructuredOutput(
        json={"type": "object", "properties": dict(reversed(schema["properties"].items()))}
    )
    schema["type"] = "array"
    assert given.json == '{"type":"object","properties":{"z":{"type":"string"},"ä":{"type":"null"}}}'


def test_it_can_be_hashed_and_sent_to_another_process():
    for given in (StructuredOutput(json={}), StructuredOutput(choice=["a", "b"]), StructuredOutput(json_object=True)):
        assert pickle.loads(pickle.dumps(given)) == given
        assert len({given, pickle.loads(pickle.dumps(given))}) == 1
        asked = NewRequest(0, "text", SamplingParams(structured_output=given))
        assert pickle.loads(pickle.dumps(asked)) == asked
    assert StructuredOutput(choice=["a"]) == StructuredOutput(choice=("a",))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, "structured_output"),
        ({"json": {}, "regex": "a"}, "structured_output"),
        ({"json_object": False}, "structured_output"),
        ({"json_object": 1}, "structured_output.json_object"),
        ({"json": "{"}, "structured_output.json"),
        ({"json": "[]"}, "structured_output.json"),
        ({"json": ""}, "structured_output.json"),
        ({"json": {"minimum": float("nan")}}, "structured_output.json"),
        ({"json": {"const": {1, 2}}}, "structured_output.json"),
        ({"json": '{"a":' * 100_000}, "structured_output.json"),
        ({"json": {"const": "\ud800"}}, "structured_output.json"),
        ({"json": {"const": "a" * 2**20}}, "structured_output.json"),
        ({"regex": ""}, "structured_output.regex"),
        ({"regex": 5}, "structured_output.regex"),
        ({"regex": "a" * 2**16 + "a"}, "structured_output.regex"),
        ({"choice": []}, "structured_output.choice"),
        ({"choice": "yes"}, "structured_output.choice"),
        ({"choice": ["yes", ""]}, "structured_output.choice"),
        ({"choice": ["yes", None]}, "structured_output.choice"),
        ({"grammar": ""}, "structured_output.grammar"),
        ({"grammar": "start: \ud800"}, "structured_output.grammar"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields, wrong):
    with pytest.raises(RequestError) as refused:
        StructuredOutput(**fields)
    assert refused.value.field == wrong


def test_beam_search_has_no_grammar():
    with pytest.raises(RequestError) as refused:
        SamplingParams(temperature=0, beam_width=2, structured_output=StructuredOutput(regex="a"))
    assert refused.value.field == "structured_output"


def test_sampling_params_take_nothing_else_for_it():
    with pytest.raises(RequestError) as refused:
        SamplingParams(structured_output={"regex": "a"})
    assert refused.value.field == "structured_output"
