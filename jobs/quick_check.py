"""A quick look at rows as most are: that they are good, and what they cost.

The planner reads every row, and needs of a good one nothing but its custom_id, how long it may answer and what its
prompt begins with. What this does not see at once to be good, it leaves to `parse_row`: it never says of a row what
`parse_row` does not say.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from jobs.formats.json_keys import count_kept, repeated_key
from jobs.openai_rows import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, LINE_FIELDS, MAX_CUSTOM_ID, read_request
from jobs.pooling import Pooling
from jobs.row_fields import Message, Prompt, RowRefused, are_plain_messages
from jobs.rows import MAX_DEPTH, SAMPLING_COLUMNS, result_columns
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows

ANSWER_TOKENS = 256
"""The guess for an answer without a limit of its own."""

Good = tuple[str | None, int, Prompt | list[Message] | None]
"""What the planner needs of a good row: its custom_id, if it counts, the most tokens of its answers, and the prompt;
that of an embedding is None, as nothing is saved where those begin alike."""
QuickCheck = Callable[[bytes], Good | None]

_MAX_KNOWN, _MAX_KNOWN_BYTES = 1000, 4096
_SEEDS = range(-(2**63), 2**63)
_line_fields = itemgetter(*LINE_FIELDS)


def answer_tokens(params: Sampling | Pooling) -> int:
    """The most tokens that a row with these parameters is expected to be answered with."""
    if isinstance(params, Pooling):
        return 0
    return (params.n or 1) * (params.max_tokens or ANSWER_TOKENS)


def quick_check(spec: JobSpec) -> QuickCheck:
    """What looks at the lines of a job. It returns None for a line that `parse_row` has to look at."""
    return _openai_check(spec) if isinstance(spec.rows, OpenAIRows) else _record_check(spec.rows, spec)


def _record_check(shape: RecordRows, spec: JobSpec) -> QuickCheck:
    special = frozenset((*result_columns(spec), *SAMPLING_COLUMNS))
    column = shape.prompt_column or shape.messages_column
    tokens = answer_tokens(spec.pooling if shape.embed else spec.sampling)
    is_good = _is_prompt if shape.prompt_column is not None else are_plain_messages
    embed = shape.embed
    if column is None or shape.system_template is not None:
        return lambda data: None

    def look(data: bytes) -> Good | None:
        try:
            record = from_json(data, allow_inf_nan=False, cache_strings="keys")
        except ValueError:
            return None
        if type(record) is not dict or not is_good(record.get(column)) or not special.isdisjoint(record):
            return None
        types = list(map(type, record.values()))
        if dict not in types and list not in types:
            keys, texts = len(record), types.count(str)
        elif _may_be_deep(data, 0):
            return None
        else:
            keys, texts = count_kept(record)
        if repeated_key(data, keys, texts) is not None:
            return None
        custom_id = record.get("custom_id")
        counts = type(custom_id) is str and len(custom_id) <= MAX_CUSTOM_ID
        return custom_id if counts else None, tokens, None if embed else record[column]

    return look


def _openai_check(spec: JobSpec) -> QuickCheck:
    endpoints = {
        CHAT_URL: _Endpoint("messages", are_plain_messages, {}),
        COMPLETIONS_URL: _Endpoint("prompt", _is_prompt, {}),
        EMBEDDINGS_URL: _Endpoint("input", _is_prompt, {}),
    }

    def look(data: bytes) -> Good | None:
        try:
            record = from_json(data, allow_inf_nan=False, cache_strings="keys")
        except ValueError:
            return None
        if type(record) is not dict or len(record) != len(LINE_FIELDS):
            return None
        try:
            custom_id, method, url, body = _line_fields(record)
        except KeyError:
            return None
        if method != "POST" or type(url) is not str or type(body) is not dict or type(custom_id) is not str:
            return None
        if not 1 <= len(custom_id) <= MAX_CUSTOM_ID or (endpoint := endpoints.get(url)) is None:
            return None
        name, is_good, known = endpoint
        content: Any = body.get(name)
        if not is_good(content):
            return None
        body[name] = None
        parameters = _parameters(body)
        asked = known.get(parameters)
        if asked is None:
            if _may_be_deep(parameters, 3):
                return None
            kept = count_kept(record)
            body[name] = content
            try:
                asked = _Asked(answer_tokens(read_request(record, spec).params), *kept)
            except RowRefused:
                return None
            if len(known) < _MAX_KNOWN and len(parameters) < _MAX_KNOWN_BYTES:
                known[parameters] = asked
        tokens, keys, texts = asked
        if url == CHAT_URL:
            keys += 2 * len(content)
            texts += 2 * len(content)
        else:
            texts += 1
        # As `repeated_key` begins, which is then not called for most rows.
        if data.count(b'"') != 2 * (keys + texts) and repeated_key(data, keys, texts) is not None:
            return None
        return custom_id, tokens, None if url == EMBEDDINGS_URL else content

    return look


class _Asked(NamedTuple):
    """What parameters come to: the most tokens of an answer. And the row's keys and strings, but for the content's."""

    tokens: int
    keys: int
    texts: int


class _Endpoint(NamedTuple):
    """The field of a body that has the content, whether that is as most are, and the parameters seen beside it."""

    content: str
    is_good: Callable[[Any], bool]
    known: dict[bytes, _Asked]


def _may_be_deep(data: bytes, inside: int) -> bool:
    """Whether this text, `inside` so many arrays and objects, might nest too deep. Brackets in strings count too."""
    return data.count(b"[") + data.count(b"{") + inside > MAX_DEPTH


def _parameters(body: dict[str, Any]) -> bytes:
    """All that decides how long a row may answer. What is often another in each row, and does not, is taken out."""
    seed = body.get("seed")
    if type(seed) is int and seed in _SEEDS:
        body["seed"] = 0
    if type(body.get("user")) is str:
        body["user"] = ""
    return to_json(body)


def _is_prompt(value: Any) -> bool:
    return type(value) is str and value != ""
