"""Arrow values as JSON, each type in one way.

null, booleans, integers, strings   themselves; dictionary-encoded values are the values
floating point                      numbers; NaN and infinities, which JSON does not have, are null
decimals                            strings with all digits: "1.50"
timestamps                          ISO 8601 with the digits of their unit; with a zone in UTC: "2024-05-01T10:00:00Z"
dates, times                        ISO 8601
durations                           integers of their unit
month-day-nano intervals            [months, days, nanoseconds]
binary                              base64
lists, structs                      arrays, objects
maps                                arrays of {"key": ..., "value": ...}
UUIDs                               "8f14e45f-ceea-467f-a0e6-2c1f0a5d3a4b"
other extension types               as what they are stored as
"""

import math
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from pydantic_core import to_json

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Writer = Callable[[Any], Any]


def json_rows(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Each row as the line of an object; where a row has a value that cannot be written, of a code and a message."""
    columns = [_Column(batch.column(place), name) for place, name in enumerate(batch.schema.names)]
    for row in range(batch.num_rows):
        try:
            yield to_json({column.name: column.value(row) for column in columns})
        except _Unwritable as error:
            yield to_json(["invalid_value", str(error)])


def json_field(field: pa.Field) -> pa.Field:
    """The column that readers of those lines find for one of a table."""
    return pa.field(field.name, _json_type(field.type))


def _json_type(kind: pa.DataType) -> pa.DataType:
    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        return _json_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.UuidType):
        return _json_type(kind.storage_type)
    if kinds.is_struct(kind):
        return pa.struct([json_field(field) for field in kind])
    if kinds.is_map(kind):
        return pa.list_(pa.struct([("key", _json_type(kind.key_type)), ("value", _json_type(kind.item_type))]))
    if kinds.is_interval(kind):
        return pa.list_(pa.int64())
    if kinds.is_nested(kind):
        return pa.list_(_json_type(kind.value_type))
    if kinds.is_duration(kind):
        return pa.int64()
    if kinds.is_boolean(kind) or kinds.is_integer(kind) or kinds.is_floating(kind):
        return kind
    return pa.string()


class _Unwritable(Exception):
    """A value of a column that JSON cannot hold."""


class _Column:
    """The values of a column, converted at once where the type allows it, else one by one."""

    def __init__(self, values: pa.Array, name: str) -> None:
        self.name = name
        self._values = values
        self._write = _writer(values.type, _all_finite(values))
        self._whole: list[Any] | None = None
        if self._write is None:
            try:
                self._whole = values.to_pylist()
            except (UnicodeDecodeError, pa.ArrowException):
                self._write = _as_python

    def value(self, row: int) -> Any:
        if self._whole is not None:
            return self._whole[row]
        scalar = self._values[row]
        try:
            return self._write(scalar) if self._write and scalar.is_valid else None
        except UnicodeDecodeError:
            raise _Unwritable(f"The column '{self.name}' is not UTF-8 in this row.") from None
        except pa.ArrowException as error:
            raise _Unwritable(f"The column '{self.name}' cannot be read in this row ({error}).") from None
        except (OverflowError, ValueError) as error:
            raise _Unwritable(f"The column '{self.name}' has a value that cannot be written ({error}).") from None


def _as_python(scalar: pa.Scalar) -> Any:
    return scalar.as_py()


def _all_finite(values: pa.Array) -> bool:
    """Whether no number in the array is NaN or infinite; False for types that are not looked into."""
    kind = values.type
    if kinds.is_float32(kind) or kinds.is_float64(kind):
        return pc.all(pc.is_finite(values)).as_py() is not False
    if kinds.is_nested(kind) and not (kinds.is_union(kind) or kinds.is_map(kind)):
        inner = values.flatten()
        return all(map(_all_finite, inner)) if kinds.is_struct(kind) else _all_finite(inner)
    return not (kinds.is_floating(kind) or kinds.is_nested(kind) or kinds.is_dictionary(kind))


def _writer(kind: pa.DataType, finite: bool) -> Writer | None:
    """What writes a scalar of the type that is not null; None where `to_pylist` does, for any number of them.

    With `finite` there are no other floating-point numbers in it.
    """
    if kinds.is_dictionary(kind) or kinds.is_run_end_encoded(kind):
        if _writer(kind.value_type, finite) is None:
            return None
        inside = _nullable(kind.value_type, finite)
        return lambda scalar: inside(scalar.value)
    if isinstance(kind, pa.UuidType):
        return lambda scalar: str(UUID(bytes=scalar.value.as_py()))
    if isinstance(kind, pa.BaseExtensionType):
        stored = _writer(kind.storage_type, finite) or _as_python
        return lambda scalar: stored(scalar.value)
    if kinds.is_struct(kind):
        return _struct_writer(kind, finite)
    if kinds.is_map(kind):
        key, item = _nullable(kind.key_type, finite), _nullable(kind.item_type, finite)
        return lambda scalar: [{"key": key(pair["key"]), "value": item(pair["value"])} for pair in scalar.values]
    if kinds.is_nested(kind):
        if _writer(kind.value_type, finite) is None:
            return None
        write = _nullable(kind.value_type, finite)
        return lambda scalar: [write(item) for item in scalar.values]
    return None if finite and kinds.is_floating(kind) else _flat_writer(kind)


def _struct_writer(kind: pa.StructType, finite: bool) -> Writer | None:
    names = [field.name for field in kind]
    if all(_writer(field.type, finite) is None for field in kind) and len(set(names)) == len(names):
        return None
    fields = [(place, field.name, _nullable(field.type, finite)) for place, field in enumerate(kind)]
    return lambda scalar: {name: write(scalar[place]) for place, name, write in fields}


def _nullable(kind: pa.DataType, finite: bool) -> Writer:
    write = _writer(kind, finite) or _as_python
    return lambda scalar: write(scalar) if scalar is not None and scalar.is_valid else None


def _flat_writer(kind: pa.DataType) -> Writer | None:
    if kinds.is_floating(kind):
        return lambda scalar: number if math.isfinite(number := scalar.as_py()) else None
    if kinds.is_decimal(kind):
        return lambda scalar: str(scalar.as_py())
    if kinds.is_timestamp(kind):
        digits, zone = _DIGITS[kind.unit], "Z" if kind.tz else ""
        return lambda scalar: _instant(scalar.value, digits) + zone
    if kinds.is_date(kind):
        return lambda scalar: scalar.as_py().isoformat()
    if kinds.is_time(kind):
        digits = _DIGITS[kind.unit]
        return lambda scalar: _instant(scalar.value, digits).partition("T")[2]
    if kinds.is_duration(kind):
        return lambda scalar: scalar.value
    if kinds.is_interval(kind):
        return lambda scalar: list(scalar.as_py())
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_fixed_size_binary(kind):
        return lambda scalar: b64encode(scalar.as_py()).decode()
    if kinds.is_binary_view(kind):
        return lambda scalar: b64encode(scalar.as_py()).decode()
    return None


def _instant(count: int, digits: int) -> str:
    """So many units after 1970, to the last digit of the unit. Raises OverflowError outside the years 1 to 9999."""
    seconds, fraction = divmod(count, 10**digits)
    text = (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S").zfill(19)
    return f"{text}.{fraction:0{digits}}" if digits else text
