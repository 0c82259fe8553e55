"""The rows of Parquet inputs: those that are asked for, as Arrow batches with their types, and as lines of JSON."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.formats.json_values import json_rows
from jobs.formats.jsonl import Line
from jobs.formats.parquet import ParquetReader, RangedFile, aligned
from jobs.formats.where import Where, parse_where, top_column
from jobs.source import Source, sample_key
from jobs.spec import Input, JobSpec
from jobs.storage import Store


class Rows(NamedTuple):
    """Some rows of file number `file`: `batch` has a row for each of `numbers`, which count from 0 in the file."""

    file: int
    numbers: list[int]
    batch: pa.RecordBatch

    def first(self, count: int) -> "Rows":
        return Rows(self.file, self.numbers[:count], self.batch.slice(0, count))


def dump_schema(schema: pa.Schema) -> str:
    """The schema as text for a job's spec."""
    return b64encode(schema.serialize()).decode()


@lru_cache(maxsize=16)
def load_schema(text: str) -> pa.Schema:
    """The schema that `dump_schema` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(b64decode(text)))


def columns_read(given: Input, schema: pa.Schema) -> list[str]:
    """The columns that are read of a file: those passed on, and those that `where` looks at."""
    if given.columns is None:
        return list(schema.names)
    looked_at = {top_column(schema, name) for name in _condition(given).columns} if given.where else set()
    return [name for name in schema.names if name in looked_at or name in given.columns]


def columns_passed_on(given: Input) -> pa.Schema:
    """The columns of the records, with their types."""
    schema = load_schema(given.arrow_schema or "")
    return schema if given.columns is None else pa.schema([schema.field(name) for name in given.columns])


def read_batches(
    spec: JobSpec,
    stores: Store,
    source: Source,
    start: int,
    end: int,
    on_read: Callable[[int], None] = lambda positions: None,
) -> Iterator[Rows]:
    """The rows at the positions [start, end) that are asked for, in order, with the columns that are passed on.

    `on_read` hears how many positions were read. Raises InputChanged, and PagemillError (`corrupt_input`).
    """
    given = spec.input
    passed_on = columns_passed_on(given)
    for piece in source.pieces(start, end):
        extent = source.extents[piece.file]
        reader = open_parquet(spec, stores, source, piece.file)
        first = source.starts[piece.file] - extent.start
        for number, batch in reader.batches(extent.start + piece.start, extent.start + piece.end):
            numbers = list(range(number - extent.start, number - extent.start + batch.num_rows))
            batch = aligned(batch, _schema_read(given))
            if given.where:
                batch, numbers = _kept(batch, numbers, _holds(given, batch, reader))
            if source.keep is not None:
                keys = [sample_key(source.starts[piece.file] + row + 1, given.sample_seed) for row in numbers]
                batch, numbers = _kept(batch, numbers, pa.array([key <= source.keep for key in keys], pa.bool_()))
            on_read(first + number + batch.num_rows - start)
            if numbers:
                yield Rows(piece.file, numbers, batch.select(passed_on.names))


def read_parquet_lines(
    spec: JobSpec, stores: Store, source: Source, start: int, end: int, on_read: Callable[[int], None]
) -> Iterator[Line]:
    """The same rows as lines of JSON objects: the number of a line is the row's, counted from 1 in its file."""
    for rows in read_batches(spec, stores, source, start, end, on_read):
        yield from lines_of(rows, spec.max_line_bytes)


def lines_of(rows: Rows, max_line_bytes: int) -> Iterator[Line]:
    """Rows as lines, see `read_parquet_lines`."""
    for place, (number, data) in enumerate(zip(rows.numbers, json_rows(rows.batch), strict=True)):
        whole = data if len(data) <= max_line_bytes else None
        yield Line(number + 1, None, number + 1, whole, rows.file, rows.batch, place)


def open_parquet(spec: JobSpec, stores: Store, source: Source, file: int) -> ParquetReader:
    """The object that a file of the input became, open."""
    extent = source.extents[file]
    original = spec.input.files[file]
    size = original.size if extent.url == original.url else stores.head(extent.url).size
    ranged = RangedFile(stores, extent.url, size, extent.etag, original.label)
    return ParquetReader(ranged, original.label, _schema_read(spec.input).names)


def _schema_read(given: Input) -> pa.Schema:
    schema = load_schema(given.arrow_schema or "")
    return pa.schema([schema.field(name) for name in columns_read(given, schema)])


@lru_cache(maxsize=16)
def _parsed(text: str) -> Where:
    return parse_where(text)


def _condition(given: Input) -> Where:
    return _parsed(given.where or "")


def _holds(given: Input, batch: pa.RecordBatch, reader: ParquetReader) -> pa.Array:
    with reader.explained():
        return _condition(given).mask(batch)


def _kept(batch: pa.RecordBatch, numbers: list[int], mask: pa.Array) -> tuple[pa.RecordBatch, list[int]]:
    keep = pc.fill_null(mask, False)
    return batch.filter(keep), [number for number, kept in zip(numbers, keep.to_pylist(), strict=True) if kept]
