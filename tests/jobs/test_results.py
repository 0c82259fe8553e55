"""What the two files say about a row, in both shapes."""

import json
from base64 import b64decode
from struct import pack
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import RowError
from jobs.formats.jsonl import Line, dumps
from jobs.records import Usage
from jobs.results import Choice, Completion, Embeddings, Outcome, TokenLogprob, error_line, output_line
from jobs.rows import Row, parse_row, result_columns
from jobs.sampling import Sampling
from jobs.spec import JobSpec
from tests.jobs.specs import openai_spec, record_spec, request

DONE = Completion((Choice("Hello!", "stop"),), Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4))
TOO_LONG = RowError(code="context_length_exceeded", message="Too long.", param="messages", line=3, byte=40)


class ResultLines(NamedTuple):
    output: bytes | None
    error: bytes | None


def lines_for(spec: JobSpec, index: int, line: Line, row: Row | None, outcome: Outcome) -> ResultLines:
    error = error_line(spec, index, line, row, outcome) if isinstance(outcome, RowError) else None
    return ResultLines(output_line(spec, index, line, row, outcome), error)


def outcome_of(data: bytes, spec: JobSpec, outcome: Outcome | None = None, index: int = 2) -> ResultLines:
    line = Line(3, 40, 40 + len(data) + 1, data)
    row = parse_row(line, spec)
    if isinstance(row, RowError):
        return lines_for(spec, index, line, None, row)
    assert outcome is not None
    return lines_for(spec, index, line, row, outcome)


def only(line: bytes | None) -> Any:
    assert line is not None
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line)


def test_an_answered_chat_request_is_a_batch_line() -> None:
    lines = outcome_of(dumps(request()), openai_spec(), DONE)
    assert lines.error is None
    found = only(lines.output)
    digest = found["id"].removeprefix("batch_req_")
    assert len(digest) == 32
    assert found == {
        "id": f"batch_req_{digest}",
        "custom_id": "r1",
        "response": {
            "status_code": 200,
            "request_id": f"req_{digest}",
            "body": {
                "id": f"chatcmpl-{digest}",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 7,
                    "completion_tokens": 3,
                    "total_tokens": 10,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }


def test_an_answered_completions_request_is_a_batch_line() -> None:
    record = request(url="/v1/completions", body={"messages": ..., "prompt": "Once"})
    body = only(outcome_of(dumps(record), openai_spec(), DONE).output)["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}]


def test_a_refused_request_is_in_the_error_file_only_and_its_error_is_in_the_response() -> None:
    lines = outcome_of(dumps(request()), openai_spec(), TOO_LONG)
    assert lines.output is None
    found = only(lines.error)
    assert (found["custom_id"], found["error"], found["response"]["status_code"]) == ("r1", None, 400)
    assert found["response"]["body"] == {
        "error": {
            "message": "Too long.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "line": 3,
        }
    }


def test_a_line_that_never_became_a_request_is_refused_the_same_way() -> None:
    found = only(outcome_of(b"{", openai_spec()).error)
    assert (found["custom_id"], found["error"], found["response"]["status_code"]) == (None, None, 400)
    assert found["response"]["body"]["error"]["code"] == "invalid_json_line"


def test_a_failure_of_ours_is_a_server_error() -> None:
    failed = RowError(code="engine_error", message="The engine ended.")
    found = only(outcome_of(dumps(request()), openai_spec(), failed).error)
    assert found["response"]["status_code"] == 500
    assert found["response"]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("code", ["batch_expired", "batch_cancelled"])
def test_a_request_that_was_never_made_has_no_response(code: str) -> None:
    found = only(outcome_of(dumps(request()), openai_spec(), RowError(code=code, message="Not run.")).error)
    assert found["response"] is None
    assert found["error"] == {"code": code, "message": "Not run."}


def test_an_answered_record_keeps_its_columns() -> None:
    lines = outcome_of(b'{"prompt":"x","n":1}', record_spec(), DONE)
    assert lines.error is None
    assert only(lines.output) == {
        "prompt": "x",
        "n": 1,
        "response": "Hello!",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "cached_tokens": 4},
        "error": None,
    }


@pytest.mark.parametrize(
    "record",
    [
        b'{ "big": 0.12345678901234567890, "huge": 1e400, "id": 12345678901234567890123, "prompt" : "x" } ',
        '{"s":"\\ud800","t":"\u2027é","prompt":"x"}'.encode(),
    ],
)
def test_columns_pass_through_byte_for_byte(record: bytes) -> None:
    output = outcome_of(record, record_spec(), DONE).output
    assert output is not None
    assert output.startswith(record.rstrip()[:-1].rstrip() + b',"response":')


def test_a_line_is_one_line_to_readers_that_cut_at_more_than_newlines_too() -> None:
    separators = "\u2028\u2029\x85"
    record = f'{{"prompt":"x",\r"{separators}":"{separators}"}}'.encode()
    answer = Completion((Choice(separators, "stop"),), Usage())
    for outcome in (answer, RowError(code="too_long", message=separators)):
        lines = outcome_of(record, record_spec(), outcome)
        for line in (lines.output, lines.error):
            if line is not None:
                assert line.decode().splitlines(keepends=True) == [line.decode()]
                found = json.loads(line)
                assert found.get("record", found)[separators] == separators
    assert only(outcome_of(record, record_spec(), answer).output)["response"] == separators


def test_a_failed_record_is_in_both_files() -> None:
    lines = outcome_of(b'{"custom_id":"a","prompt":"x"}', record_spec(), TOO_LONG)
    error = {"code": "context_length_exceeded", "message": "Too long.", "param": "messages"}
    assert only(lines.output) == {
        "custom_id": "a",
        "prompt": "x",
        "response": None,
        "finish_reason": None,
        "usage": None,
        "error": error,
    }
    assert only(lines.error) == {
        "custom_id": "a",
        "line": 3,
        "byte": 40,
        "error": error,
        "record": {"custom_id": "a", "prompt": "x"},
    }


@pytest.mark.parametrize("data", [b"{}", b"{ }", b'{"prompt":5}'])
def test_a_record_without_a_prompt_keeps_its_place(data: bytes) -> None:
    lines = outcome_of(data, record_spec())
    found = only(lines.output)
    assert {name: found.pop(name) for name in ("response", "finish_reason", "usage")} == dict.fromkeys(
        ("response", "finish_reason", "usage")
    )
    assert found.pop("error")["code"] in ("missing_required_parameter", "invalid_type")
    assert found == json.loads(data)
    assert only(lines.error)["record"] == json.loads(data)


@pytest.mark.parametrize("data", [b"{", b"[1]", b'{"prompt":NaN}', b"\xff"])
def test_a_line_that_is_no_record_keeps_its_place(data: bytes) -> None:
    lines = outcome_of(data, record_spec())
    assert set(only(lines.output)) == {"response", "finish_reason", "usage", "error"}
    assert only(lines.error)["record"] is None


def test_a_line_that_was_too_long_keeps_its_place() -> None:
    spec, line = record_spec(), Line(3, 40, 10**9, None)
    error = parse_row(line, spec)
    assert isinstance(error, RowError)
    lines = lines_for(spec, 2, line, None, error)
    assert only(lines.output)["error"]["code"] == "line_too_long"
    assert only(lines.error)["record"] is None


def test_a_column_of_the_users_is_not_overwritten() -> None:
    lines = outcome_of(b'{"prompt":"x","error":"mine"}', record_spec())
    assert only(lines.output)["error"]["code"] == "column_collision"
    assert only(lines.error)["record"] == {"prompt": "x", "error": "mine"}


def test_the_same_answer_gives_the_same_bytes_and_another_row_other_ids() -> None:
    first, again, other = (outcome_of(dumps(request()), openai_spec(), DONE, index) for index in (2, 2, 3))
    assert first == again
    assert only(first.output)["id"] != only(other.output)["id"]
    elsewhere = outcome_of(dumps(request()), openai_spec(id="batch_2"), DONE)
    assert only(first.output)["id"] != only(elsewhere.output)["id"]


OWN = {*result_columns(record_spec(sampling=Sampling(logprobs=0))), "prompt", "custom_id", *Sampling.model_fields}
names = st.text().filter(lambda name: name not in OWN)


@given(st.text(), st.dictionaries(names, st.none() | st.text() | st.integers()))
def test_any_text_and_any_columns_come_out_as_they_went_in(text: str, columns: dict[str, Any]) -> None:
    record = {**columns, "prompt": "x"}
    found = only(
        outcome_of(
            dumps(record),
            record_spec(),
            Completion((Choice(text, "length"),), Usage(prompt_tokens=1, completion_tokens=1)),
        ).output
    )
    assert found["response"] == text
    assert {name: found[name] for name in record} == record


ALTERNATIVES = (TokenLogprob(5, "Hé", "Hé".encode(), -0.25, 1), TokenLogprob(6, "\ufffd", b"\xc3", -2.0, 2))
TOKENS = (ALTERNATIVES[0]._replace(top=ALTERNATIVES), TokenLogprob(7, "!", b"!", -1.5, 4, top=ALTERNATIVES[:1]))
TWO = Completion(
    (Choice("Hé!", "stop", TOKENS), Choice("Ho", "length", TOKENS[:1])),
    Usage(prompt_tokens=2, completion_tokens=3),
    prompt_logprobs=(None, TOKENS[0]),
)


def test_several_answers_to_a_chat_row_are_its_choices_with_openai_s_logprobs() -> None:
    body = only(outcome_of(dumps(request()), openai_spec(), TWO).output)["response"]["body"]
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "Hé!"), (1, "Ho")]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    first, second = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "Hé",
        "logprob": -0.25,
        "bytes": [72, 195, 169],
        "top_logprobs": [
            {"token": "Hé", "logprob": -0.25, "bytes": [72, 195, 169]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [195]},
        ],
    }
    assert (second["token"], len(second["top_logprobs"])) == ("!", 1)
    assert body["usage"]["completion_tokens"] == 3
    assert body["prompt_logprobs"] == [
        None,
        {
            "5": {"logprob": -0.25, "rank": 1, "decoded_token": "Hé"},
            "6": {"logprob": -2.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]


def test_logprobs_of_a_completions_row_are_parallel_lists() -> None:
    record = request(url="/v1/completions", body={"messages": ..., "prompt": "Once"})
    body = only(outcome_of(dumps(record), openai_spec(), TWO).output)["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hé", "!"],
        "token_logprobs": [-0.25, -1.5],
        "top_logprobs": [{"Hé": -0.25, "\ufffd": -2.0}, {"Hé": -0.25}],
        "text_offset": [0, 2],
    }


def test_a_record_s_columns_have_one_type_in_all_rows_of_a_job() -> None:
    one, several = record_spec(sampling=Sampling(logprobs=1)), record_spec(sampling=Sampling(n=2))
    single = Completion(TWO.choices[:1], Usage(prompt_tokens=2, completion_tokens=2))
    found = only(outcome_of(dumps({"prompt": "a"}), one, single).output)
    assert (found["response"], found["finish_reason"]) == ("Hé!", "stop")
    assert [token["token"] for token in found["logprobs"]] == ["Hé", "!"]
    failed = only(outcome_of(dumps({"prompt": "a"}), one, TOO_LONG).output)
    assert failed.keys() == found.keys()
    found = only(outcome_of(dumps({"prompt": "a"}), several, TWO).output)
    assert (found["response"], found["finish_reason"]) == (["Hé!", "Ho"], ["stop", "length"])
    assert "logprobs" not in found


def test_a_record_that_has_a_column_of_logprobs_is_refused_only_where_the_job_writes_one() -> None:
    data = dumps({"prompt": "a", "logprobs": "mine"})
    assert only(outcome_of(data, record_spec(), DONE).output)["logprobs"] == "mine"
    refused = outcome_of(data, record_spec(sampling=Sampling(logprobs=0)))
    assert only(refused.error)["error"]["code"] == "column_collision"


VECTORS = Embeddings((pack("<2f", 0.1, -2.0), pack("<2f", 1e-20, 3.0)), Usage(prompt_tokens=7, cached_tokens=2))


def test_vectors_are_openai_s_list_object_whose_numbers_are_the_float32_ones() -> None:
    record = request({"messages": ..., "input": ["a", "b"]}, url="/v1/embeddings")
    body = only(outcome_of(dumps(record), openai_spec(), VECTORS).output)["response"]["body"]
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", 0), ("embedding", 1)]
    assert [pack("<2f", *item["embedding"]) for item in body["data"]] == list(VECTORS.vectors)
    assert body["data"][0]["embedding"] == [0.100000001, -2.0]


def test_vectors_in_base64_are_their_bytes() -> None:
    record = request({"messages": ..., "input": ["a", "b"], "encoding_format": "base64"}, url="/v1/embeddings")
    body = only(outcome_of(dumps(record), openai_spec(), VECTORS).output)["response"]["body"]
    assert [b64decode(item["embedding"]) for item in body["data"]] == list(VECTORS.vectors)


def test_an_embedded_record_gets_a_column_of_its_vector() -> None:
    spec = record_spec(prompt_column="prompt", embed=True)
    one = Embeddings(VECTORS.vectors[:1], Usage(prompt_tokens=3))
    found = only(outcome_of(b'{"prompt":"a"}', spec, one).output)
    assert list(found) == ["prompt", "embedding", "usage", "error"]
    assert found["embedding"] == [0.100000001, -2.0]
    failed = only(outcome_of(b'{"prompt":"a"}', spec, TOO_LONG).output)
    assert (failed["embedding"], failed["error"]["code"]) == (None, "context_length_exceeded")
