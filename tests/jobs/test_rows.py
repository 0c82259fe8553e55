"""What is a row, what is not, and what is said about it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import RowError
from jobs.formats.jsonl import Line, dumps
from jobs.pooling import Pooling
from jobs.rows import MAX_DEPTH, Row, parse_row
from jobs.sampling import Sampling, StructuredOutput
from tests.jobs.specs import openai_spec, read, record_spec, request

OPENAI = openai_spec(model_aliases=("gpt-4o-mini",))
RECORDS = record_spec()


def row(record: Any, spec: Any = OPENAI) -> Row:
    found = read(record, spec)
    assert isinstance(found, Row), found
    return found


def error(record: Any, spec: Any = OPENAI) -> RowError:
    found = read(record, spec)
    assert isinstance(found, RowError), found
    assert (found.line, found.byte) == (3, 40)
    assert found.message
    return found


def refusal(record: Any, spec: Any = OPENAI) -> tuple[str, str | None]:
    found = error(record, spec)
    return found.code, found.param


def test_a_chat_request_is_a_row() -> None:
    found = row(request(body={"max_tokens": 5, "temperature": 0}))
    assert (found.line, found.offset, found.custom_id, found.kind) == (3, 40, "r1", "chat")
    assert found.prompts[0] == ({"role": "user", "content": "Hi"},)
    assert found.params == Sampling(max_tokens=5, temperature=0)
    assert found.record["method"] == "POST"


@pytest.mark.parametrize("prompt", ["Once", [1, 2, 3]])
def test_a_completions_request_is_a_row(prompt: Any) -> None:
    found = row(request(url="/v1/completions", body={"messages": ..., "prompt": prompt}))
    assert (found.kind, found.prompts[0]) == ("completion", prompt)


def test_the_rows_own_parameters_win_over_the_jobs() -> None:
    spec = openai_spec(sampling=Sampling(max_tokens=9, top_p=0.5))
    assert row(request(body={"max_tokens": 3, "top_p": None}), spec).params == Sampling(max_tokens=3, top_p=0.5)
    assert row(request(), spec).params == spec.sampling


def test_max_completion_tokens_is_max_tokens() -> None:
    assert row(request(body={"max_completion_tokens": 7})).params.max_tokens == 7
    assert row(request(body={"max_completion_tokens": 7, "max_tokens": 7})).params.max_tokens == 7
    assert refusal(request(body={"max_completion_tokens": 7, "max_tokens": 8})) == (
        "invalid_value",
        "body.max_completion_tokens",
    )
    assert refusal(request(body={"max_completion_tokens": 0})) == ("invalid_value", "body.max_completion_tokens")


@pytest.mark.parametrize("stop", ["x", ["x", "y"], []])
def test_stop_is_a_string_or_several(stop: Any) -> None:
    expected = stop if isinstance(stop, str) else tuple(stop)
    assert row(request(body={"stop": stop})).params.stop == expected


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temperature": 3}, "invalid_value", "body.temperature"),
        ({"temperature": "hot"}, "invalid_type", "body.temperature"),
        ({"temperature": {}}, "invalid_type", "body.temperature"),
        ({"temperature": []}, "invalid_type", "body.temperature"),
        ({"temperature": True}, "invalid_type", "body.temperature"),
        ({"max_tokens": 0}, "invalid_value", "body.max_tokens"),
        ({"max_tokens": True}, "invalid_type", "body.max_tokens"),
        ({"max_tokens": 5.5}, "invalid_type", "body.max_tokens"),
        ({"top_p": 0}, "invalid_value", "body.top_p"),
        ({"seed": 2**64}, "invalid_value", "body.seed"),
        ({"ignore_eos": 1}, "invalid_type", "body.ignore_eos"),
        ({"stop": 5}, "invalid_type", "body.stop"),
        ({"stop": [["x"]]}, "invalid_type", "body.stop"),
        ({"stop": ["x", 1]}, "invalid_type", "body.stop"),
        ({"stop": ""}, "invalid_value", "body.stop"),
        ({"stop_token_ids": [True]}, "invalid_type", "body.stop_token_ids"),
        ({"stop_token_ids": [-1]}, "invalid_value", "body.stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "invalid_type", "body.stop_token_ids"),
    ],
)
def test_a_sampling_parameter_that_is_wrong_is_named(body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(request(body=body)) == (code, param)


def test_true_is_not_one_even_after_a_one() -> None:
    for name, value in (("max_tokens", 1), ("stop_token_ids", [1])):
        row(request(body={name: value}))
        wrong: Any = True if value == 1 else [True]
        assert refusal(request(body={name: wrong})) == ("invalid_type", f"body.{name}")


@pytest.mark.parametrize("field", ["custom_id", "method", "url", "body"])
@pytest.mark.parametrize("value", [..., None])
def test_each_field_of_a_line_is_needed(field: str, value: Any) -> None:
    record = request() | {field: value}
    if value is ...:
        del record[field]
    assert refusal(record) == ("missing_required_parameter", field)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": 5}, "invalid_type", "custom_id"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"method": "GET"}, "invalid_value", "method"),
        ({"method": 1}, "invalid_value", "method"),
        ({"url": "/v1/images"}, "invalid_url", "url"),
        ({"url": ["/v1/completions"]}, "invalid_url", "url"),
        ({"body": []}, "invalid_type", "body"),
        ({"priority": 1}, "unknown_parameter", "priority"),
    ],
)
def test_a_line_that_is_no_request_says_why(changes: dict[str, Any], code: str, param: str) -> None:
    assert refusal(request() | changes) == (code, param)


def test_an_unserved_url_lists_those_that_are() -> None:
    message = error(request(url="/v1/images")).message
    assert "/v1/chat/completions" in message
    assert "/v1/completions" in message


def test_the_model_may_be_left_out_or_be_an_alias() -> None:
    row(request(body={"model": ...}))
    row(request(body={"model": "gpt-4o-mini"}))
    assert refusal(request(body={"model": "gpt-5"})) == ("mismatched_model", "body.model")
    assert "--model-alias" in error(request(body={"model": "gpt-5"})).message
    assert refusal(request(body={"model": 5})) == ("invalid_type", "body.model")


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": False, "top_logprobs": 0, "n": None, "presence_penalty": None, "stream": False},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "best_of": None, "audio": None},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "batch", "parallel_tool_calls": True},
    ],
)
def test_parameters_that_ask_for_nothing_pass(body: dict[str, Any]) -> None:
    assert row(request(body=body)).params == Sampling()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("echo", True),
        ("suffix", "x"),
        ("reasoning_effort", "low"),
    ],
)
def test_a_parameter_that_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    assert refusal(request(body={name: value})) == ("unsupported_parameter", f"body.{name}")


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"n": 3, "best_of": 5}, {"n": 3, "best_of": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"presence_penalty": 0.5, "frequency_penalty": -1}, {"presence_penalty": 0.5, "frequency_penalty": -1}),
        ({"logit_bias": {"50": -100, "7": 1.5}}, {"logit_bias": ((7, 1.5), (50, -100))}),
        ({"logit_bias": {}}, {"logit_bias": ()}),
        ({"min_tokens": 2, "repetition_penalty": 1.1}, {"min_tokens": 2, "repetition_penalty": 1.1}),
        ({"beam_width": 4, "early_stopping": "never"}, {"beam_width": 4, "early_stopping": "never"}),
    ],
)
def test_a_row_s_sampling_is_read(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    found = row(request(body=body)).params
    assert found == Sampling(**sampling)
    assert Sampling.model_validate_json(found.model_dump_json()) == found


def embedding(body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return request({"messages": ..., **body}, url="/v1/embeddings", **fields)


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_an_embeddings_row_has_one_input_or_several(value: Any, prompts: tuple[Any, ...]) -> None:
    found = row(embedding({"input": value, "dimensions": 4, "encoding_format": "base64"}))
    assert (found.kind, found.prompts) == ("embedding", prompts)
    assert found.params == Pooling(dimensions=4, encoding_format="base64")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_request", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": ["a", 1]}, "invalid_type", "input[1]"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "temperature": 1}, "unknown_parameter", "temperature"),
    ],
)
def test_an_embeddings_row_that_is_wrong_is_refused_by_name(body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(embedding(body)) == (code, f"body.{param}")


def test_a_record_is_embedded_where_the_job_says_so() -> None:
    spec = record_spec(prompt_column="q", embed=True, pooling=Pooling(truncate_prompt_tokens=-1))
    found = row({"q": "Hi", "response": "mine", "temperature": "hot"}, spec)
    assert (found.kind, found.prompts, found.params) == ("embedding", ("Hi",), spec.pooling)
    assert refusal({"q": "Hi", "embedding": 1}, spec) == ("column_collision", "embedding")


def test_a_completion_row_says_how_many_alternatives_in_logprobs_itself() -> None:
    def completion(logprobs: Any) -> dict[str, Any]:
        return request({"prompt": "a", "messages": ..., "logprobs": logprobs}, url="/v1/completions")

    assert row(completion(3)).params == Sampling(logprobs=3)
    assert refusal(completion(True)) == ("invalid_type", "body.logprobs")


SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}


@pytest.mark.parametrize(
    ("body", "structure"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "[a-z]+"}}, {"regex": "[a-z]+"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ("yes", "no")}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
    ],
)
def test_what_an_answer_has_to_be_is_read_in_both_spellings(body: dict[str, Any], structure: dict[str, Any]) -> None:
    found = row(request(body=body)).params
    assert found == Sampling(structured_output=StructuredOutput(**structure))
    assert Sampling.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"n": 0}, "invalid_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"n": 129}, "invalid_value", "n"),
        ({"logprobs": 3}, "invalid_type", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"logit_bias": 5}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": True}}, "invalid_type", "logit_bias.5"),
        ({"logit_bias": [5]}, "invalid_value", "logit_bias"),
        ({"logit_bias": ["5"]}, "invalid_value", "logit_bias"),
        ({"seed": {}}, "invalid_type", "seed"),
        ({"early_stopping": "sometimes"}, "invalid_type", "early_stopping"),
        ({"response_format": "json"}, "invalid_type", "response_format"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "invalid_type", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "invalid_type",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "invalid_type", "structured_outputs.regex"),
        ({"structured_outputs": {"xml": "a"}}, "invalid_value", "structured_outputs.xml"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "invalid_value",
            "structured_outputs",
        ),
    ],
)
def test_a_parameter_that_is_wrong_is_refused_by_name(body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(request(body=body)) == (code, f"body.{param}")


@pytest.mark.parametrize("name", ["temprature", "prompt", "x" * 200])
def test_a_parameter_that_nobody_knows_is_refused_by_name(name: str) -> None:
    assert refusal(request(body={name: 1})) == ("unknown_parameter", f"body.{name[:80]}")


def test_streaming_is_refused() -> None:
    assert refusal(request(body={"stream": True})) == ("streaming_unsupported", "body.stream")
    assert refusal(request(body={"stream": 0})) == ("invalid_type", "body.stream")


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    messages = [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
    ]
    assert row(request(body={"messages": messages})).prompts[0] == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
    )


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        (..., "invalid_request", ""),
        ([], "invalid_value", ""),
        ("Hi", "invalid_type", ""),
        (["Hi"], "invalid_type", "[0]"),
        ([{"content": "x"}], "missing_required_parameter", "[0].role"),
        ([{"role": "user"}], "missing_required_parameter", "[0].content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": None}], "invalid_type", "[1].content"),
        ([{"role": [], "content": "x"}], "invalid_type", "[0].role"),
        ([{"role": "robot", "content": "x"}], "invalid_value", "[0].role"),
        ([{"role": "tool", "content": "x"}], "unsupported_parameter", "[0].role"),
        ([{"role": "user", "content": ["x"]}], "invalid_type", "[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_parameter", "[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_type", "[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "unsupported_parameter", "[0].tool_calls"),
        ([{"role": "user", "content": "x", "mood": "good"}], "unknown_parameter", "[0].mood"),
    ],
)
def test_messages_that_are_none_say_which_and_why(messages: Any, code: str, param: str) -> None:
    assert refusal(request(body={"messages": messages})) == (code, f"body.messages{param}")


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        (..., "invalid_request", ""),
        ("", "invalid_value", ""),
        ([], "invalid_value", ""),
        (5, "invalid_type", ""),
        (["a", "b"], "unsupported_parameter", ""),
        ([[1], [2]], "unsupported_parameter", ""),
        ([1, True], "invalid_type", "[1]"),
        ([1, 2.0], "invalid_type", "[1]"),
        ([1, -2], "invalid_value", "[1]"),
    ],
)
def test_a_prompt_that_is_none_says_why(prompt: Any, code: str, param: str) -> None:
    record = request(url="/v1/completions", body={"messages": ..., "prompt": prompt})
    assert refusal(record) == (code, f"body.prompt{param}")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"{}}", "invalid_json_line"),
        (b'{"prompt":NaN}', "invalid_json_line"),
        (b'{"prompt":"x","a":-Infinity}', "invalid_json_line"),
        (b'{"prompt":"\xff"}', "invalid_json_line"),
        (b'{"prompt":"a\tb"}', "invalid_json_line"),
        (b'{"prompt":"x","a":' + b"9" * 5000 + b"}", "invalid_json_line"),
        ('{"prompt":"x"}'.encode("utf-16"), "invalid_json_line"),
        (b'{"prompt":"x","a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"[" * 100_000 + b"]" * 100_000, "invalid_json_line"),
        (b"[]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'"prompt"', "not_an_object"),
    ],
)
def test_a_line_that_is_no_object_is_no_row(data: bytes, code: str) -> None:
    assert refusal(data, RECORDS) == (code, None)


def test_depth_counts_nesting_and_not_brackets_in_text() -> None:
    row(b'{"prompt":"' + b"[{" * 500 + b'"}', RECORDS)
    row(b'{"prompt":"x","a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}", RECORDS)
    row({"prompt": "x", "many": [[] for _ in range(500)]}, RECORDS)


def test_a_line_that_is_too_long_is_no_row() -> None:
    found = parse_row(Line(7, 900, 99_999_999, None), RECORDS)
    assert isinstance(found, RowError)
    assert (found.code, found.line, found.byte) == ("line_too_long", 7, 900)


def test_the_custom_id_of_a_refused_row_is_known_where_it_can_be() -> None:
    assert error(request(custom_id="r9", body={"n": 0})).custom_id == "r9"
    assert error(request(custom_id=5)).custom_id is None
    assert error({"custom_id": "r7"}, RECORDS).custom_id == "r7"


def test_a_record_with_a_prompt_is_one_user_message() -> None:
    found = row({"custom_id": "a", "prompt": "Hi", "more": [1]}, RECORDS)
    assert (found.kind, found.custom_id, found.prompts[0]) == ("chat", "a", ({"role": "user", "content": "Hi"},))
    assert found.record["more"] == [1]


def test_the_jobs_system_message_comes_first() -> None:
    spec = record_spec(prompt_column="q", system="Be brief.")
    assert row({"q": "Hi"}, spec).prompts[0] == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    )
    assert refusal({"q": [1, 2]}, spec) == ("invalid_value", "q")


def test_a_record_with_token_ids_goes_past_the_template() -> None:
    found = row({"prompt": [1, 2]}, RECORDS)
    assert (found.kind, found.prompts[0]) == ("completion", [1, 2])


def test_a_record_with_messages_is_a_chat() -> None:
    spec = record_spec(messages_column="chat")
    messages = [{"role": "user", "content": "Hi"}]
    assert row({"chat": messages}, spec).prompts[0] == tuple(messages)
    assert refusal({"chat": []}, spec) == ("invalid_value", "chat")
    assert refusal({"chat": [{"role": "user"}]}, spec) == ("missing_required_parameter", "chat[0].content")


@pytest.mark.parametrize(
    ("record", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": {"a": 1}}, "invalid_type", "prompt"),
        ({"prompt": "x", "temperature": -1}, "invalid_value", "temperature"),
        ({"prompt": "x", "seed": "abc"}, "invalid_type", "seed"),
        ({"prompt": "x", "response": "old"}, "column_collision", "response"),
        ({"prompt": "x", "error": None}, "column_collision", "error"),
    ],
)
def test_a_record_that_is_no_row_says_why(record: dict[str, Any], code: str, param: str) -> None:
    assert refusal(record, RECORDS) == (code, param)


def test_a_records_own_sampling_columns_count() -> None:
    spec = record_spec(sampling=Sampling(max_tokens=9, seed=1))
    found = row({"prompt": "x", "max_tokens": 3, "seed": None, "top_k": 5, "ignore_eos": "just a column"}, spec)
    assert found.params == Sampling(max_tokens=3, seed=1, top_k=5)


def test_a_column_named_custom_id_that_is_no_short_string_is_just_a_column() -> None:
    assert row({"prompt": "x", "custom_id": 5}, RECORDS).custom_id is None
    assert row({"prompt": "x", "custom_id": "y" * 1000}, RECORDS).custom_id is None


def test_lone_surrogates_may_pass_through_but_not_into_a_prompt() -> None:
    assert row(b'{"prompt":"x","other":"\\ud800"}', RECORDS).record["other"] == "\ud800"
    assert refusal(b'{"prompt":"\\ud800"}', RECORDS) == ("invalid_value", None)
    assert refusal(b'{"prompt":"x","stop":"\\ud800"}', RECORDS) == ("invalid_value", "stop")
    assert row(b'{"prompt":"\\ud83d\\ude00"}', RECORDS).prompts[0] == ({"role": "user", "content": "😀"},)


def test_an_error_about_a_lone_surrogate_can_be_written() -> None:
    found = error(b'{"custom_id":"\\ud800","method":"POST","url":"/v1/completions","body":{},"\\udfff":1}')
    assert found.code == "unknown_parameter"
    assert dumps(found.model_dump()).decode()


@given(st.binary(max_size=80))
def test_any_bytes_are_a_row_or_an_error(data: bytes) -> None:
    for spec in (OPENAI, RECORDS):
        assert isinstance(read(data, spec), Row | RowError)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "user", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
names = [
    "messages",
    "prompt",
    "model",
    "stop",
    "stop_token_ids",
    "seed",
    "n",
    "max_tokens",
    "stream",
    "tools",
    "x",
]


@given(
    st.dictionaries(st.sampled_from(names), json_values, max_size=4),
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
)
def test_any_body_is_a_row_or_an_error(body: dict[str, Any], url: str) -> None:
    record = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    for spec, value in ((OPENAI, record), (RECORDS, body), (record_spec(messages_column="messages"), body)):
        assert isinstance(read(value, spec), Row | RowError)
