"""OpenAI batch lines: `custom_id`, `method`, `url` and `body`, with the error codes that OpenAI's validation returns.

A body parameter is one of: served (it reaches the engine), harmless (it cannot change the answer), not served but at
its neutral value, or an error. Nothing is dropped in silence.
"""

from typing import Any, NamedTuple

from jobs.pooling import Pooling
from jobs.row_fields import (
    SHOWN,
    Kind,
    Prompt,
    RowRefused,
    read_inputs,
    read_messages,
    read_pooling,
    read_prompt,
    read_sampling,
    read_structured,
    shown,
    wrong_type,
)
from jobs.sampling import Sampling, StructuredOutput
from jobs.spec import JobSpec

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"

LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID = 512
# These two are spelled in OpenAI's own ways, see `_logprobs` and `_structured_output`.
_SAMPLING = {name: f"body.{name}" for name in Sampling.model_fields if name not in ("logprobs", "structured_output")}
_POOLING = {name: f"body.{name}" for name in Pooling.model_fields}
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls"}
)
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "stream_options": (),
}
"""Parameters that are known and not served, with the values (beside null) that ask for nothing."""
_STRUCTURED = ("response_format", "structured_outputs")
_COMMON = (
    frozenset(_SAMPLING) | _HARMLESS | {"model", "stream", "max_completion_tokens", "logprobs", "lora", *_STRUCTURED}
)
_KNOWN = {
    CHAT_URL: _COMMON | {"messages", "top_logprobs"},
    COMPLETIONS_URL: _COMMON | {"prompt"},
    EMBEDDINGS_URL: frozenset(_POOLING) | _HARMLESS | {"model", "stream", "lora", "input"},
}


class Request(NamedTuple):
    """What a row asks for: `prompts` is one prompt, or all the inputs of an embedding."""

    kind: Kind
    prompts: tuple[Prompt, ...]
    params: Sampling | Pooling
    lora: str | None = None


def read_request(record: dict[str, Any], spec: JobSpec) -> Request:
    """What an OpenAI batch line asks for. Raises RowRefused."""
    for name in LINE_FIELDS:
        if record.get(name) is None:
            raise RowRefused("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    if len(record) > len(LINE_FIELDS):
        extra = next(name for name in record if name not in LINE_FIELDS)
        raise RowRefused("unknown_parameter", f"Unknown parameter: {shown(extra)}.", extra[:SHOWN])
    _check_custom_id(record["custom_id"])
    if record["method"] != "POST":
        raise RowRefused("invalid_value", f"Invalid value: {shown(record['method'])}. The method is 'POST'.", "method")
    url, body = record["url"], record["body"]
    if type(url) is not str or url not in _KNOWN:
        supported = ", ".join(f"'{known}'" for known in _KNOWN)
        raise RowRefused("invalid_url", f"The URL {shown(url)} is not served; those that are: {supported}.", "url")
    if type(body) is not dict:
        raise wrong_type("body", "an object", body)
    _check_stream(body)
    _check_model(body, spec)
    _check_parameters(body, _KNOWN[url])
    return _read_body(url, body, spec)


def _read_body(url: str, body: dict[str, Any], spec: JobSpec) -> Request:
    lora = _lora(body, spec)
    if url == EMBEDDINGS_URL:
        inputs = read_inputs(_required(body, "input"), "body.input")
        return Request("embedding", inputs, read_pooling(body, _POOLING, spec.pooling), lora)
    sampling = _sampling(body, spec.sampling, chat=url == CHAT_URL)
    if url == CHAT_URL:
        return Request("chat", (read_messages(_required(body, "messages"), "body.messages"),), sampling, lora)
    return Request("completion", (read_prompt(_required(body, "prompt"), "body.prompt"),), sampling, lora)


def _required(body: dict[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise RowRefused("invalid_request", f"{name.capitalize()} parameter is required.", f"body.{name}")
    return body[name]


def _check_custom_id(value: Any) -> None:
    if type(value) is not str:
        raise wrong_type("custom_id", "a string", value)
    if not 1 <= len(value) <= MAX_CUSTOM_ID:
        raise RowRefused(
            "invalid_value", f"Invalid 'custom_id': {len(value)} characters, not 1 to {MAX_CUSTOM_ID}.", "custom_id"
        )


def _check_stream(body: dict[str, Any]) -> None:
    stream = body.get("stream")
    if stream is True:
        raise RowRefused("streaming_unsupported", "Streaming is not supported in batch jobs.", "body.stream")
    if stream is not None and stream is not False:
        raise wrong_type("body.stream", "a boolean", stream)


def _check_model(body: dict[str, Any], spec: JobSpec) -> None:
    model = body.get("model")
    if model is None or (type(model) is str and spec.accepts_model(model)):
        return
    if type(model) is not str:
        raise wrong_type("body.model", "a string", model)
    raise RowRefused(
        "mismatched_model",
        f"The model {shown(model)} for this request is not the job's model {shown(spec.model)}. "
        f"To let {spec.model} answer it, submit with --model-alias {shown(model)}.",
        "body.model",
    )


def _lora(body: dict[str, Any], spec: JobSpec) -> str | None:
    name = body.get("lora")
    if name is None:
        return spec.lora
    if type(name) is not str or not name:
        raise wrong_type("body.lora", "the name of an adapter", name)
    return name


def _check_parameters(body: dict[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name in known:
            continue
        param = f"body.{name[:SHOWN]}"
        if name not in _UNSERVED:
            raise RowRefused("unknown_parameter", f"Unknown parameter: '{param}'.", param)
        if value is not None and not any(_same(value, neutral) for neutral in _UNSERVED[name]):
            raise RowRefused("unsupported_parameter", f"'{param}' is not supported: remove it from the request.", param)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    return bool(value == other) and (type(value) is bool) == (type(other) is bool)


def _sampling(body: dict[str, Any], defaults: Sampling, *, chat: bool) -> Sampling:
    fields, params = body, _SAMPLING
    if (limit := body.get("max_completion_tokens")) is not None:
        other = body.get("max_tokens")
        if other is not None and not _same(other, limit):
            raise RowRefused(
                "invalid_value",
                "'body.max_tokens' and 'body.max_completion_tokens' mean the same, and differ here.",
                "body.max_completion_tokens",
            )
        fields, params = fields | {"max_tokens": limit}, params | {"max_tokens": "body.max_completion_tokens"}
    if (structured := _structured_output(body)) is not None:
        fields, params = fields | {"structured_output": structured}, params | {"structured_output": "body"}
    if (logprobs := _chat_logprobs(body) if chat else body.get("logprobs")) is not None:
        param = "body.top_logprobs" if chat else "body.logprobs"
        fields, params = fields | {"logprobs": logprobs}, params | {"logprobs": param}
    return read_sampling(fields, params, defaults)


def _chat_logprobs(body: dict[str, Any]) -> Any:
    """How many alternatives a chat row wants: it says in `logprobs` whether, and in `top_logprobs` how many."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and type(wanted) is not bool:
        raise wrong_type("body.logprobs", "a boolean", wanted)
    if wanted:
        return 0 if top is None else top
    if top not in (None, 0):
        raise RowRefused(
            "invalid_value", "'body.top_logprobs' is only for rows with 'body.logprobs' true.", "body.top_logprobs"
        )
    return None


def _structured_output(body: dict[str, Any]) -> StructuredOutput | None:
    """What `response_format`, as OpenAI has it, or `structured_outputs`, as vLLM has it, asks of the answer's text."""
    given = [name for name in _STRUCTURED if body.get(name) is not None]
    for name in given:
        if type(body[name]) is not dict:
            raise wrong_type(f"body.{name}", "an object", body[name])
    if len(given) == 2:
        message = "'body.response_format' and 'body.structured_outputs' exclude each other."
        raise RowRefused("invalid_value", message, "body.structured_outputs")
    if not given:
        return None
    param = f"body.{given[0]}"
    wanted = body[given[0]]
    return _response_format(wanted, param) if given[0] == "response_format" else read_structured(wanted, param)


def _response_format(value: dict[str, Any], param: str) -> StructuredOutput | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            described = value.get("json_schema")
            if type(described) is not dict:
                raise wrong_type(f"{param}.json_schema", "an object", described)
            if type(described.get("schema")) is not dict:
                raise wrong_type(f"{param}.json_schema.schema", "an object", described.get("schema"))
            return read_structured({"json": described["schema"]}, f"{param}.json_schema")
        case other:
            message = f"Invalid value: {shown(other)}. Supported types are: text, json_object and json_schema."
            raise RowRefused("invalid_value", message, f"{param}.type")
