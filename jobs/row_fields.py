"""What the fields of a row may hold: chat messages, prompts and sampling parameters, in any input shape."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jobs.pooling import Pooling
from jobs.sampling import Sampling, StructuredOutput

Message = dict[str, str]
"""`role` and `content`; the role is system, user or assistant."""
Prompt = str | list[int] | tuple[Message, ...]
Kind = Literal["chat", "completion", "embedding"]
MAX_INPUTS = 2048

_ROLES = frozenset({"system", "user", "assistant"})
_TOOL_ROLES = frozenset({"tool", "function"})
_UNSERVED_MESSAGE_FIELDS = frozenset({"refusal", "audio", "annotations", "tool_calls", "function_call", "tool_call_id"})
SHOWN = 80


class RowRefused(Exception):
    """A field of a row is not what it must be. `parse_row` turns this into a RowError with the row's place."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def shown(value: Any) -> str:
    """The value as JSON, cut where it is long, for an error message."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def wrong_type(param: str, wanted: str, value: Any) -> RowRefused:
    return RowRefused(
        "invalid_type", f"Invalid type for '{param}': expected {wanted}, but got {_json_type(value)}.", param
    )


def _json_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


def read_messages(value: Any, param: str) -> tuple[Message, ...]:
    """Chat messages whose content is text, or a list of text parts, which are joined. Raises RowRefused."""
    if type(value) is not list:
        raise wrong_type(param, "an array of messages", value)
    if not value:
        raise RowRefused("invalid_value", f"Invalid '{param}': an empty array of messages.", param)
    if are_plain_messages(value):
        return tuple(value)
    return tuple(_message(item, f"{param}[{index}]") for index, item in enumerate(value))


def are_plain_messages(value: Any) -> bool:
    """Whether these are messages as they should be: nearly all are, and need no copy."""
    if type(value) is not list:
        return False
    try:
        for item in value:
            if item["role"] not in _ROLES or type(item["content"]) is not str or len(item) != 2:
                return False
    except (KeyError, TypeError):
        return False
    return bool(value)


def _message(item: Any, param: str) -> Message:
    if type(item) is not dict:
        raise wrong_type(param, "an object", item)
    for name in ("role", "content"):
        if name not in item:
            path = f"{param}.{name}"
            raise RowRefused("missing_required_parameter", f"Missing required parameter: '{path}'.", path)
    for name, value in item.items():
        path = f"{param}.{name[:SHOWN]}"
        if name in _UNSERVED_MESSAGE_FIELDS and value not in (None, []):
            raise RowRefused("unsupported_parameter", f"'{path}' is not supported.", path)
        if name not in _UNSERVED_MESSAGE_FIELDS and name not in ("role", "content", "name"):
            raise RowRefused("unknown_parameter", f"Unknown parameter: '{path}'.", path)
    return {"role": _role(item["role"], f"{param}.role"), "content": _content(item["content"], f"{param}.content")}


def _role(value: Any, param: str) -> str:
    if type(value) is not str:
        raise wrong_type(param, "a string", value)
    if value == "developer":
        return "system"  # OpenAI's newer name for it, which chat templates do not know
    if value in _TOOL_ROLES:
        raise RowRefused("unsupported_parameter", f"Messages with the role '{value}' are not supported.", param)
    if value not in _ROLES:
        raise RowRefused(
            "invalid_value", f"Invalid value: {shown(value)}. Supported roles are: system, user and assistant.", param
        )
    return value


def _content(value: Any, param: str) -> str:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(param, "a string or an array of text parts", value)
    texts = []
    for index, part in enumerate(value):
        if type(part) is not dict:
            raise wrong_type(f"{param}[{index}]", "an object", part)
        if part.get("type") != "text":
            raise RowRefused(
                "unsupported_parameter",
                f"A content part of type {shown(part.get('type'))} is not supported: only 'text' is.",
                f"{param}[{index}].type",
            )
        if type(part.get("text")) is not str:
            raise wrong_type(f"{param}[{index}].text", "a string", part.get("text"))
        texts.append(part["text"])
    return "".join(texts)


def read_prompt(value: Any, param: str) -> str | list[int]:
    """A prompt that is a text or a list of token ids, and not empty. Raises RowRefused."""
    if type(value) is str or type(value) is list:
        if not value:
            raise RowRefused("invalid_value", f"Invalid '{param}': an empty prompt.", param)
        if type(value) is list:
            _check_token_ids(value, param)
        return value
    raise wrong_type(param, "a string or an array of token ids", value)


def _check_token_ids(value: list[Any], param: str) -> None:
    for index, token in enumerate(value):
        if type(token) is str or type(token) is list:
            raise RowRefused(
                "unsupported_parameter", f"'{param}' holds several prompts: only one prompt a row is supported.", param
            )
        if type(token) is not int:
            raise wrong_type(f"{param}[{index}]", "a token id", token)
        if token < 0:
            raise RowRefused(
                "invalid_value", f"Invalid '{param}[{index}]': {token} is not a token id.", f"{param}[{index}]"
            )


def read_inputs(value: Any, param: str) -> tuple[Prompt, ...]:
    """The texts to embed: one text or list of token ids, or an array of them. Raises RowRefused."""
    several = type(value) is list and bool(value) and type(value[0]) in (str, list)
    if not several:
        return (read_prompt(value, param),)
    if len(value) > MAX_INPUTS:
        raise RowRefused("invalid_value", f"Invalid '{param}': {len(value)} inputs, more than {MAX_INPUTS}.", param)
    return tuple(read_prompt(item, f"{param}[{index}]") for index, item in enumerate(value))


def read_pooling(fields: Mapping[str, Any], params: Mapping[str, str], defaults: Pooling) -> Pooling:
    """The parameters of an embedding among a row's `fields`, as `read_sampling` reads those of sampling."""
    values = {name: value for name, value in fields.items() if name in params and value is not None}
    try:
        return Pooling.model_validate(values).over(defaults) if values else defaults
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first, params[str(first["loc"][0])]) from None


def read_sampling(fields: Mapping[str, Any], params: Mapping[str, str], defaults: Sampling) -> Sampling:
    """The sampling parameters among a row's `fields`, over the job's defaults; null is not set.

    `params` maps the names that are looked for to the paths that errors call them by. Raises RowRefused.
    """
    values = {
        name: _hashable(value, params[name]) for name, value in fields.items() if name in params and value is not None
    }
    if not values:
        return defaults
    try:
        return _sampling(defaults, tuple(values), *values.values())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first, params[str(first["loc"][0])]) from None


def read_structured(value: dict[str, Any], param: str) -> StructuredOutput:
    """What the text of an answer has to be, by an object with one of `json`, `regex` and so on. Raises RowRefused."""
    fields = {name: tuple(field) if type(field) is list else field for name, field in value.items()}
    try:
        return StructuredOutput.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first, ".".join(map(str, (param, *first["loc"][:1])))) from None


def _invalid(error: ErrorDetails, param: str) -> RowRefused:
    code = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    return RowRefused(code, f"Invalid '{param}': {error['msg'].removeprefix('Value error, ')}.", param)


@lru_cache(maxsize=1024, typed=True)
def _sampling(defaults: Sampling, names: tuple[str, ...], *values: Any) -> Sampling:
    # Most rows of a file set the same parameters; typed, because True is no 1 here though it is equal.
    return Sampling.model_validate(dict(zip(names, values, strict=True))).over(defaults)


def _hashable(value: Any, param: str) -> Any:
    if type(value) is dict:
        if not param.endswith("logit_bias"):
            raise wrong_type(param, "a number, a string or an array", value)
        for token, bias in value.items():
            if type(bias) not in (int, float):
                raise wrong_type(f"{param}.{token[:SHOWN]}", "a number", bias)
        return tuple(value.items())
    if type(value) is not list:
        return value
    if {type(item) for item in value} not in ({str}, {int}, set()):
        message = f"Invalid type for '{param}': expected an array of strings, or of integers."
        raise RowRefused("invalid_type", message, param)
    return tuple(value)


def refuse_lone_surrogates(*values: Any) -> None:
    """Raises RowRefused where a string among the values holds half of a surrogate pair, which no tokenizer takes."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RowRefused("invalid_value", "The text holds a lone surrogate, which is not a character.") from error
