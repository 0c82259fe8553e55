"""OpenAI batch lines: `custom_id`, `method`, `url` and `body`, with the error codes that OpenAI's validation returns.

A body parameter is one of: served (it reaches the engine), harmless (it cannot change the answer), not served but at
its neutral value, or an error. Nothing is dropped in silence.
"""

from typing import Any, NamedTuple

from jobs.row_fields import (
    SHOWN,
    Kind,
    Prompt,
    RowRefused,
    read_messages,
    read_prompt,
    read_sampling,
    shown,
    wrong_type,
)
from jobs.spec import JobSpec, Sampling

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID = 512
_SAMPLING = {name: f"body.{name}" for name in Sampling.model_fields}
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls"}
)
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
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
_COMMON = frozenset(_SAMPLING) | _HARMLESS | {"model", "stream", "max_completion_tokens"}
_KNOWN = {CHAT_URL: _COMMON | {"messages"}, COMPLETIONS_URL: _COMMON | {"prompt"}}


class Request(NamedTuple):
    kind: Kind
    prompt: Prompt
    sampling: Sampling


def read_request(record: dict[str, Any], spec: JobSpec) -> Request:
    """What an OpenAI batch line asks for. Raises RowRefused."""
    for name in _LINE_FIELDS:
        if record.get(name) is None:
            raise RowRefused("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    if len(record) > len(_LINE_FIELDS):
        extra = next(name for name in record if name not in _LINE_FIELDS)
        raise RowRefused("unknown_parameter", f"Unknown parameter: {shown(extra)}.", extra[:SHOWN])
    _check_custom_id(record["custom_id"])
    if record["method"] != "POST":
        raise RowRefused("invalid_value", f"Invalid value: {shown(record['method'])}. The method is 'POST'.", "method")
    url, body = record["url"], record["body"]
    if type(url) is not str or url not in _KNOWN:
        supported = " and ".join(f"'{known}'" for known in _KNOWN)
        raise RowRefused("invalid_url", f"The URL {shown(url)} is not served; those that are: {supported}.", "url")
    if type(body) is not dict:
        raise wrong_type("body", "an object", body)
    _check_stream(body)
    _check_model(body, spec)
    _check_parameters(body, _KNOWN[url])
    sampling = _sampling(body, spec.sampling)
    if url == CHAT_URL:
        if body.get("messages") is None:
            raise RowRefused("invalid_request", "Messages parameter is required.", "body.messages")
        return Request("chat", read_messages(body["messages"], "body.messages"), sampling)
    if body.get("prompt") is None:
        raise RowRefused("invalid_request", "Prompt parameter is required.", "body.prompt")
    return Request("completion", read_prompt(body["prompt"], "body.prompt"), sampling)


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


def _sampling(body: dict[str, Any], defaults: Sampling) -> Sampling:
    limit = body.get("max_completion_tokens")
    if limit is None:
        return read_sampling(body, _SAMPLING, defaults)
    other = body.get("max_tokens")
    if other is not None and not _same(other, limit):
        raise RowRefused(
            "invalid_value",
            "'body.max_tokens' and 'body.max_completion_tokens' mean the same, and differ here.",
            "body.max_completion_tokens",
        )
    params = _SAMPLING | {"max_tokens": "body.max_completion_tokens"}
    return read_sampling(body | {"max_tokens": limit}, params, defaults)
