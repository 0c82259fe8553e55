"""Arrow types in place of others, and values in them."""

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.formats.arrow_types import cast, plain, without_nulls
from tests.jobs.arrow_tables import tables

# Of these Arrow's own cast makes arrays that are too short.
NULLS = pa.table(
    {
        "pairs": pa.array([None, [None, None]], pa.list_(pa.null(), 2)),
        "lists": pa.array([[None, None], [None]], pa.list_(pa.null())),
        "structs": pa.array([[{"a": None}, None], None], pa.list_(pa.struct([("a", pa.null())]), 2)),
        "word and pair": pa.array(
            [None, {"word": "red", "pair": None}],
            pa.struct([("word", pa.dictionary(pa.int8(), pa.string())), ("pair", pa.list_(pa.null(), 2))]),
        ),
    }
)


@given(table=tables(), first=st.integers(0, 5), rows=st.integers(0, 6))
@example(table=NULLS, first=0, rows=2)
@example(table=NULLS, first=1, rows=1)
@settings(max_examples=150, deadline=None)
def test_values_are_the_same_in_types_without_dictionaries_views_and_nulls(
    table: pa.Table, first: int, rows: int
) -> None:
    for column in table.slice(first, rows).columns:
        for kind in (plain(column.type), without_nulls(plain(column.type))):
            for chunk in column.chunks:
                found = cast(chunk, kind)
                found.validate(full=True)
                assert found.type == kind
                assert [str(value) for value in found] == [str(value) for value in chunk]
