"""A quick look at rows as most are: that they are good, and what they cost.

The planner reads every row, and needs of a good one nothing but its custom_id and how long it may answer. What this
does not see at once to be good, it leaves to `parse_row`: it never says of a row what `parse_row` does not say.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from pydantic_core import from_json

from jobs.formats.json_keys import count_keys, repeated_key
from jobs.openai_rows import CHAT_URL, LINE_FIELDS, MAX_CUSTOM_ID, read_request
from jobs.pooling import Pooling
from jobs.row_fields import RowRefused, is_plain_message
from jobs.rows import MAX_DEPTH, SAMPLING_COLUMNS, result_columns
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows

ANSWER_TOKENS = 256
"""The guess for an answer without a limit of its own."""

_MAX_KNOWN = 1000
_line_fields = itemgetter(*LINE_FIELDS)
_CHAT_FIELDS = frozenset(
    {"max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n"}
    | {"presence_penalty", "frequency_penalty", "stream", "user"}
)


Counted = tuple[str | None, int, int | None]
"""A good row's custom_id, the most tokens of its answers, and its keys, where they are counted and none lies deep."""
QuickCheck = Callable[[bytes], tuple[str | None, int] | None]


def answer_tokens(params: Sampling | Pooling) -> int:
    """The most tokens that a row with these parameters is expected to be answered with."""
    if isinstance(params, Pooling):
        return 0
    return (params.n or 1) * (params.max_tokens or ANSWER_TOKENS)


def quick_check(spec: JobSpec) -> QuickCheck:
    """What looks at the lines of a job.

    It returns a good row's custom_id, if it counts, and the most tokens of its answers; None for a line that
    `parse_row` has to look at.
    """
    check = _openai_check(spec) if isinstance(spec.rows, OpenAIRows) else _record_check(spec.rows, spec)

    def look(data: bytes) -> tuple[str | None, int] | None:
        try:
            record = from_json(data, allow_inf_nan=False)
        except ValueError:
            return None
        if type(record) is not dict or (found := check(record)) is None:
            return None
        custom_id, tokens, keys = found
        if keys is None:
            # Brackets inside strings count too, which sends a few more rows the long way.
            if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
                return None
            keys = count_keys(record)
        return None if repeated_key(data, keys) is not None else (custom_id, tokens)

    return look


def _record_check(shape: RecordRows, spec: JobSpec) -> Callable[[dict[str, Any]], Counted | None]:
    special = frozenset((*result_columns(spec), *SAMPLING_COLUMNS))
    column = shape.prompt_column or shape.messages_column
    tokens = answer_tokens(spec.pooling if shape.embed else spec.sampling)
    is_good = _is_prompt if shape.prompt_column is not None else _are_messages
    if column is None or shape.system_template is not None:
        return lambda record: None

    def check(record: dict[str, Any]) -> Counted | None:
        if not is_good(record.get(column)) or not special.isdisjoint(record):
            return None
        custom_id = record.get("custom_id")
        counts = type(custom_id) is str and len(custom_id) <= MAX_CUSTOM_ID
        return custom_id if counts else None, tokens, None

    return check


def _openai_check(spec: JobSpec) -> Callable[[dict[str, Any]], Counted | None]:
    models = frozenset((spec.model, *spec.model_aliases))
    known: dict[tuple[Any, ...], int] = {}

    def check(record: dict[str, Any]) -> Counted | None:
        try:
            custom_id, method, url, body = _line_fields(record)
        except KeyError:
            return None
        if len(record) > len(LINE_FIELDS) or url != CHAT_URL or method != "POST" or type(body) is not dict:
            return None
        if type(custom_id) is not str or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            return None
        parameters = _parameters(body, models)
        if parameters is None or not _are_messages(body.get("messages")):
            return None
        tokens = known.get(parameters)
        if tokens is None:
            try:
                tokens = answer_tokens(read_request(record, spec).params)
            except RowRefused:
                return None
            if len(known) < _MAX_KNOWN:
                known[parameters] = tokens
        return custom_id, tokens, len(record) + len(body) + 2 * len(body["messages"])

    return check


def _parameters(body: dict[str, Any], models: frozenset[str]) -> tuple[Any, ...] | None:
    """All of a body but its messages as a key, with types: true is not 1. None where it holds anything unusual."""
    key: list[Any] = []
    for name, value in body.items():
        if name == "model":
            if type(value) is not str or value not in models:
                return None
        elif name in _CHAT_FIELDS:
            if type(value) not in (int, float, str, bool):
                return None
            key += (name, value, type(value))
        elif name != "messages":
            return None
    return tuple(key)


def _is_prompt(value: Any) -> bool:
    return type(value) is str and value != ""


def _are_messages(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(is_plain_message, value))
