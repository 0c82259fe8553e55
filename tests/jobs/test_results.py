"""What the two files say about a row, in both shapes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import RowError
from jobs.formats.jsonl import Line, dumps
from jobs.results import Completion, ResultLines, lines_for
from jobs.rows import RESULT_COLUMNS, parse_row
from jobs.spec import JobSpec, Sampling
from tests.jobs.specs import openai_spec, record_spec, request

DONE = Completion("Hello!", "stop", prompt_tokens=7, completion_tokens=3, cached_tokens=4)
TOO_LONG = RowError(code="context_length_exceeded", message="Too long.", param="messages", line=3, byte=40)


def outcome_of(data: bytes, spec: JobSpec, outcome: Completion | RowError | None = None, index: int = 2) -> ResultLines:
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
        '{"s":"\\ud800","t":"\u2028","prompt":"x"}'.encode(),
    ],
)
def test_columns_pass_through_byte_for_byte(record: bytes) -> None:
    output = outcome_of(record, record_spec(), DONE).output
    assert output is not None
    assert output.startswith(record.rstrip()[:-1].rstrip() + b',"response":')


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


OWN = {*RESULT_COLUMNS, "prompt", "custom_id", *Sampling.model_fields}
names = st.text().filter(lambda name: name not in OWN)


@given(st.text(), st.dictionaries(names, st.none() | st.text() | st.integers()))
def test_any_text_and_any_columns_come_out_as_they_went_in(text: str, columns: dict[str, Any]) -> None:
    record = {**columns, "prompt": "x"}
    found = only(outcome_of(dumps(record), record_spec(), Completion(text, "length", 1, 1)).output)
    assert found["response"] == text
    assert {name: found[name] for name in record} == record
