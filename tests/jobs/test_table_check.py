"""The planner's look at a batch of a table and the look at its rows agree."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.parquet_rows import Rows, dump_schema, lines_of
from jobs.quick_check import answer_tokens
from jobs.rows import Row, parse_row
from jobs.sampling import Sampling
from jobs.spec import JobSpec
from jobs.table_check import GoodRows, table_check
from tests.jobs.specs import record_spec

TEXTS = st.none() | st.sampled_from(["", "Hi", "\u2028", "\0" * 30, "x" * 513, 'a":"'])
BROKEN = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
)


def spec_of(schema: pa.Schema, **fields: Any) -> JobSpec:
    spec = record_spec(**fields)
    given_input = spec.input.model_copy(update={"format": "parquet", "arrow_schema": dump_schema(schema)})
    return spec.model_copy(update={"input": given_input})


def looked_at(batch: pa.RecordBatch, **fields: Any) -> GoodRows | None:
    return table_check(spec_of(batch.schema, **fields), batch.schema)(batch)


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


@given(
    prompts=st.lists(TEXTS.filter(bool) | TEXTS, min_size=1, max_size=4),
    more=st.dictionaries(
        st.sampled_from(["custom_id", "n", "temperature", "usage", "other"]),
        st.sampled_from(
            [
                (pa.string(), TEXTS),
                (pa.large_string(), TEXTS),
                (pa.int64(), st.none() | st.integers(0, 2**40)),
                (pa.float64(), st.none() | st.floats()),
                (pa.binary(), st.binary(max_size=3)),
                (pa.list_(pa.string()), st.lists(TEXTS, max_size=2)),
            ]
        ),
        max_size=3,
    ),
    embed=st.booleans(),
    line_limit=st.sampled_from([1024, 1 << 20]),
    data=st.data(),
)
@settings(max_examples=300)
def test_rows_that_are_good_in_a_batch_are_good_as_lines(
    prompts: list[str | None], more: dict[str, Any], embed: bool, line_limit: int, data: st.DataObject
) -> None:
    columns = {"prompt": pa.array(prompts, pa.string())}
    for name, (kind, values) in more.items():
        drawn = data.draw(st.lists(values, min_size=len(prompts), max_size=len(prompts)))
        columns[name] = pa.array(drawn, kind)
    batch = batch_of(**columns)
    shape = {"prompt_column": "prompt", "embed": embed, "max_line_bytes": line_limit}
    good = looked_at(batch, **shape)
    if good is None:
        return
    spec = spec_of(batch.schema, **shape)
    lines = list(lines_of(Rows(0, list(range(len(prompts))), batch), line_limit))
    rows = [parse_row(line, spec) for line in lines]
    assert all(isinstance(row, Row) for row in rows), rows
    assert [name for name, _ in zip(good.custom_ids, rows, strict=False)] == [row.custom_id for row in rows]
    assert {answer_tokens(row.params) for row in rows if isinstance(row, Row)} == {good.tokens}


def test_a_batch_of_good_rows_is_looked_at_once() -> None:
    batch = batch_of(prompt=["Hi", "there"], custom_id=["a", None], rank=[1, None])
    good = looked_at(batch, sampling=Sampling(max_tokens=7))
    assert good is not None
    assert (list(good.custom_ids), good.tokens) == (["a", None], 7)
    lines = [line.data or b"" for line in lines_of(Rows(0, [0, 1], batch), 1000)]
    assert good.sizes == pytest.approx([len(line) for line in lines], abs=40)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(prompt=["Hi", None]),
        batch_of(prompt=["Hi", ""]),
        batch_of(prompt=BROKEN),
        batch_of(prompt=["Hi", "x"], other=BROKEN),
        batch_of(prompt=[b"Hi"]),
        batch_of(prompt=["Hi"], usage=[1]),
        batch_of(prompt=["Hi"], temperature=[9]),
        batch_of(prompt=["Hi"], custom_id=["x" * 513]),
        batch_of(prompt=["x" * (3 << 20)]),
        batch_of(text=["Hi"]),
    ],
)
def test_what_may_not_be_good_is_looked_at_row_by_row(batch: pa.RecordBatch) -> None:
    assert looked_at(batch) is None
