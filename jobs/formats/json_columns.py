"""JSON records as Arrow columns: what types they have, found over all records, and the records in those types.

Types are merged value by value: nothing gives way to anything, whole numbers to floating point, objects and arrays are
merged inside. What has no common type is kept as JSON text, and so is what no column type holds exactly: whole numbers
beyond 64 bits, or beyond 53 among floating-point ones. A column of nothing but nulls is one of strings.
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

import pyarrow as pa

from jobs.errors import PagemillError
from jobs.formats.jsonl import dumps

MAX_COLUMNS = 10_000
"""Of all names that stand in the records, at any depth: what is held while types are found does not grow further."""
MAX_FIELDS = 500
"""In one nested object: one with more names is taken for a dictionary, which is kept as JSON text."""

_MAX_DEPTH = 24  # the readers of Arrow schemas stop at 64 levels
_JSON_TEXT = {"pagemill": "json"}
_BOOL, _INT, _WIDE, _HUGE, _FLOAT, _STRING, _LIST, _OBJECT, _TEXT = (1 << bit for bit in range(9))
_SCALARS = {
    0: pa.string(),
    _BOOL: pa.bool_(),
    _INT: pa.int64(),
    _WIDE: pa.int64(),
    _INT | _WIDE: pa.int64(),
    _FLOAT: pa.float64(),
    _INT | _FLOAT: pa.float64(),
    _STRING: pa.string(),
}
_KINDS = {bool: _BOOL, float: _FLOAT, str: _STRING, list: _LIST, dict: _OBJECT}

Encoder = Callable[[Any], Any]


class _Seen:
    """The kinds of values that stood at one place of the records."""

    __slots__ = ("fields", "item", "kinds")

    def __init__(self) -> None:
        self.kinds = 0
        self.fields: dict[str, _Seen] = {}
        self.item: _Seen | None = None

    def become_text(self) -> None:
        self.kinds |= _TEXT
        self.fields = {}
        self.item = None


class JsonColumns:
    """Finds the columns that hold all records that are added."""

    def __init__(self) -> None:
        self._columns: dict[str, _Seen] = {}
        self._names = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Raises PagemillError (`too_many_columns`)."""
        for name, value in record.items():
            seen = self._columns.get(name)
            if seen is None:
                if self._names >= MAX_COLUMNS:
                    raise PagemillError(
                        f"The records have more than {MAX_COLUMNS:,} columns.",
                        code="too_many_columns",
                        hint="Write JSON lines, which have no columns.",
                    )
                self._names += 1
                seen = self._columns[name] = _Seen()
            self._see(seen, value, 1)

    def schema(self) -> pa.Schema:
        """The columns in the order in which they were first seen."""
        return pa.schema([_field(name, seen) for name, seen in self._columns.items()])

    def _see(self, seen: _Seen, value: Any, depth: int) -> None:
        if value is None or seen.kinds & _TEXT:
            return
        kind = _int_kind(value) if type(value) is int else _KINDS[type(value)]
        seen.kinds |= kind
        if kind == _OBJECT:
            self._see_object(seen, value, depth)
        elif kind == _LIST:
            if depth >= _MAX_DEPTH:
                seen.become_text()
                return
            seen.item = seen.item or _Seen()
            for item in value:
                self._see(seen.item, item, depth + 1)

    def _see_object(self, seen: _Seen, value: dict[str, Any], depth: int) -> None:
        for name, inner in value.items():
            field = seen.fields.get(name)
            if field is None:
                if depth >= _MAX_DEPTH or len(seen.fields) >= MAX_FIELDS or self._names >= MAX_COLUMNS:
                    seen.become_text()
                    return
                self._names += 1
                field = seen.fields[name] = _Seen()
            self._see(field, inner, depth + 1)


def _int_kind(value: int) -> int:
    if -(1 << 53) <= value <= 1 << 53:
        return _INT
    return _WIDE if -(1 << 63) <= value < 1 << 63 else _HUGE


def _field(name: str, seen: _Seen) -> pa.Field:
    if (scalar := _SCALARS.get(seen.kinds)) is not None:
        return pa.field(name, scalar)
    if seen.kinds == _LIST and seen.item is not None:
        return pa.field(name, pa.list_(_field("element", seen.item)))
    # Parquet has no structs without fields.
    if seen.kinds == _OBJECT and seen.fields:
        return pa.field(name, pa.struct([_field(key, field) for key, field in seen.fields.items()]))
    return json_text_field(name)


def json_text_field(name: str) -> pa.Field:
    """A column of JSON text."""
    return pa.field(name, pa.string(), metadata=_JSON_TEXT)


def is_json_text(field: pa.Field) -> bool:
    """Whether the strings of a column, or of an item or a field in one, are JSON text."""
    return field.metadata is not None and field.metadata.get(b"pagemill") == b"json"


def encoder_of(field: pa.Field) -> Encoder | None:
    """What makes a JSON value one that Arrow takes for this field; None where it takes them as they are."""
    if is_json_text(field):
        return lambda value: None if value is None else _json_text(value)
    if pa.types.is_list(field.type):
        of_item = encoder_of(field.type.value_field)
        return None if of_item is None else lambda items: items if items is None else [of_item(item) for item in items]
    if pa.types.is_struct(field.type):
        inner = {sub.name: made for sub in field.type.fields if (made := encoder_of(sub)) is not None}
        return _object_encoder(inner) if inner else None
    return None


def _json_text(value: Any) -> str:
    try:
        return dumps(value).decode()
    except ValueError:
        return dumps(_without_infinities(value)).decode()


def _without_infinities(value: Any) -> Any:
    """With null for numbers beyond floating point: they were read as infinities, which JSON does not have."""
    match value:
        case float():
            return value if isfinite(value) else None
        case list():
            return [_without_infinities(item) for item in value]
        case dict():
            return {name: _without_infinities(item) for name, item in value.items()}
        case _:
            return value


def _object_encoder(inner: Mapping[str, Encoder]) -> Encoder:
    def encode(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {**value, **{name: made(value[name]) for name, made in inner.items() if name in value}}

    return encode


def column_of(records: Iterable[Mapping[str, Any] | None], field: pa.Field, encode: Encoder | None) -> pa.Array:
    """One column of records, null where a record is None or does not have it."""
    values = [None if record is None else record.get(field.name) for record in records]
    if encode is not None:
        values = [encode(value) for value in values]
    return pa.array(values, field.type)


def without_surrogates(value: Any) -> Any:
    """The JSON value with U+FFFD for each lone surrogate, in names too: Arrow's strings are UTF-8, which has none."""
    match value:
        case str():
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case list():
            return [without_surrogates(item) for item in value]
        case dict():
            return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
        case _:
            return value
