"""A quick look at rows as most are: that they are good, and what they cost.

The planner reads every row, and needs of a good one nothing but its custom_id and how long it may answer. What this
does not see at once to be good, it leaves to `parse_row`: it never says of a row what `parse_row` does not say.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from pydantic_core import from_json

from jobs.formats.json_keys import count_keys, repeated_key
from jobs.openai_rows import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, LINE_FIELDS, MAX_CUSTOM_ID, read_request
from jobs.pooling import Pooling
from jobs.row_fields import RowRefused, is_plain_message
from jobs.rows import MAX_DEPTH, SAMPLING_COLUMNS, result_columns
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows

ANSWER_TOKENS = 256
"""The guess for an answer without a limit of its own."""

QuickCheck = Callable[[bytes], tuple[str | None, int] | None]
_Counted = tuple[str | None, int, int | None]
"""A good row's custom_id, the most tokens of its answers, and its keys, where they are counted and none lies deep."""

_MAX_KNOWN = 1000
_SEEDS = range(-(2**63), 2**63)
_BOXES = frozenset({dict, list})
_line_fields = itemgetter(*LINE_FIELDS)


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
            # Of all strings, only keys come again and again.
            record = from_json(data, allow_inf_nan=False, cache_strings="keys")
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


def _record_check(shape: RecordRows, spec: JobSpec) -> Callable[[dict[str, Any]], _Counted | None]:
    special = frozenset((*result_columns(spec), *SAMPLING_COLUMNS))
    column = shape.prompt_column or shape.messages_column
    tokens = answer_tokens(spec.pooling if shape.embed else spec.sampling)
    is_good = _is_prompt if shape.prompt_column is not None else _are_messages
    if column is None or shape.system_template is not None:
        return lambda record: None

    def check(record: dict[str, Any]) -> _Counted | None:
        if not is_good(record.get(column)) or not special.isdisjoint(record):
            return None
        custom_id = record.get("custom_id")
        counts = type(custom_id) is str and len(custom_id) <= MAX_CUSTOM_ID
        is_flat = _BOXES.isdisjoint(map(type, record.values()))
        return custom_id if counts else None, tokens, len(record) if is_flat else None

    return check


def _openai_check(spec: JobSpec) -> Callable[[dict[str, Any]], _Counted | None]:
    known: dict[tuple[Any, ...], int] = {}

    def check(record: dict[str, Any]) -> _Counted | None:
        try:
            custom_id, method, url, body = _line_fields(record)
        except KeyError:
            return None
        if len(record) > len(LINE_FIELDS) or method != "POST" or type(url) is not str or type(body) is not dict:
            return None
        if type(custom_id) is not str or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            return None
        asked = _ASKED.get(url)
        if asked is None:
            return None
        name, is_good = asked
        content = body.pop(name, None)
        if not is_good(content):
            return None
        parameters = _parameters(url, body)
        try:
            tokens = known.get(parameters)
        except TypeError:
            return None  # an array or an object is among them
        if tokens is None:
            body[name] = content
            try:
                tokens = answer_tokens(read_request(record, spec).params)
            except RowRefused:
                return None
            del body[name]
            if len(known) < _MAX_KNOWN:
                known[parameters] = tokens
        in_content = 2 * len(content) if url == CHAT_URL else 0
        return custom_id, tokens, len(LINE_FIELDS) + 1 + len(body) + in_content

    return check


def _parameters(url: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """What of a row decides how long it may answer, as a key; with types, since true is not 1.

    What may differ from row to row and changes nothing is replaced in `body`.
    """
    seed = body.get("seed")
    if type(seed) is int and seed in _SEEDS:
        body["seed"] = 0
    if "user" in body:
        body["user"] = None
    values = body.values()
    return (url, *body, *values, *map(type, values))


def _is_prompt(value: Any) -> bool:
    return type(value) is str and value != ""


def _are_messages(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(is_plain_message, value))


_ASKED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    CHAT_URL: ("messages", _are_messages),
    COMPLETIONS_URL: ("prompt", _is_prompt),
    EMBEDDINGS_URL: ("input", _is_prompt),
}
"""What a body asks, by the URL, and whether it is as most are."""
