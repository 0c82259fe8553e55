"""Arrow tables of all types that Parquet carries, for hypothesis."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from jobs.formats.arrow_types import cast

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_YEARS = {"min_value": datetime(1700, 1, 1), "max_value": datetime(2200, 1, 1)}
_INT64 = st.integers(-(2**63), 2**63 - 1)

FLAT: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.int64(): _INT64,
    pa.float16(): st.floats(width=16),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.binary(): st.binary(max_size=8),
    pa.large_binary(): st.binary(max_size=8),
    pa.binary(4): st.binary(min_size=4, max_size=4),
    pa.date32(): st.dates(date(1, 1, 1), date(9999, 12, 31)),
    pa.date64(): st.dates(date(1970, 1, 1), date(9999, 12, 31)),
    pa.time32("s"): st.integers(0, 86_399),
    pa.time32("ms"): st.integers(0, 86_399_999),
    pa.time64("us"): st.times(),
    pa.time64("ns"): st.integers(0, 86_399_999_999_999),
    pa.timestamp("s"): _INT64.filter(lambda count: abs(count) < 6 * 10**10),
    pa.timestamp("ms"): _INT64.filter(lambda count: abs(count) < 6 * 10**13),
    pa.timestamp("us", "UTC"): st.datetimes(**_YEARS).map(lambda moment: moment.replace(tzinfo=UTC)),
    pa.timestamp("ns", "Europe/Paris"): _INT64.filter(lambda count: abs(count) < 10**18),
    pa.duration("us"): st.timedeltas(timedelta(-(10**6)), timedelta(10**6)),
    pa.duration("ns"): _INT64,
    pa.decimal32(7, 2): st.decimals(1 - 10**5, 10**5 - 1, places=2),
    pa.decimal64(15, 4): st.decimals(-(10**10), 10**10, places=4),
    pa.decimal128(12, 3): st.decimals(-(10**8), 10**8, places=3).map(Decimal),
    pa.decimal256(50, 20): st.decimals(-(10**20), 10**20, places=20),
}
"""Types with the values that a column of them may have, and that may stand in others."""
VIEWS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.string_view(): _TEXT,
    pa.binary_view(): st.binary(max_size=8),
}
"""Those that Arrow writes at the top only."""


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        names.flatmap(
            lambda found: st.tuples(*[inner] * len(found)).map(
                lambda kinds: pa.struct(list(zip(found, kinds, strict=True)))
            )
        ),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    )


def types() -> st.SearchStrategy[pa.DataType]:
    # Others than these are written as the values that they stand for; and those in other types are not read by parts.
    dictionaries = st.builds(
        pa.dictionary, st.sampled_from([pa.int8(), pa.int32()]), st.sampled_from([pa.string(), pa.binary(), pa.int64()])
    )
    flat = st.sampled_from(sorted(FLAT, key=str))
    return st.one_of(st.recursive(flat, _nested, max_leaves=4), dictionaries, st.sampled_from(list(VIEWS)))


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Python values of a type, nulls among them."""
    if pa.types.is_dictionary(kind):
        some: st.SearchStrategy[Any] = {
            pa.string(): st.sampled_from(["red", "green", ""]),
            pa.binary(): st.sampled_from([b"red", b"\x00", b""]),
            pa.int64(): st.integers(0, 3),
        }[kind.value_type]
    elif pa.types.is_fixed_size_list(kind):
        some = st.lists(values(kind.value_type), min_size=2, max_size=2)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        some = st.lists(values(kind.value_type), max_size=3)
    elif pa.types.is_struct(kind):
        some = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif pa.types.is_map(kind):
        # DuckDB reads no map that has a key twice.
        some = st.lists(st.tuples(_TEXT, values(kind.item_type)), max_size=3, unique_by=lambda pair: pair[0])
    else:
        some = {**FLAT, **VIEWS}[kind]
    return st.none() | some


@st.composite
def tables(draw: st.DrawFn, *, min_rows: int = 0, max_rows: int = 12) -> pa.Table:
    """A table of one to four columns."""
    kinds = draw(st.lists(types(), min_size=1, max_size=4))
    rows = draw(st.integers(min_rows, max_rows))
    columns = {
        f"column {place}": pa.array(draw(st.lists(values(kind), min_size=rows, max_size=rows)), kind)
        for place, kind in enumerate(kinds)
    }
    return pa.table(columns)


def cast_table(table: pa.Table, types: Sequence[pa.DataType]) -> pa.Table:
    """The table with its columns in these types."""
    columns = [
        pa.chunked_array([cast(chunk, kind) for chunk in column.chunks], kind)
        for column, kind in zip(table.columns, types, strict=True)
    ]
    return pa.table(columns, names=table.column_names)
