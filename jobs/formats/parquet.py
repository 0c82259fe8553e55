"""Parquet files read in place: what rows and columns they have, and any range of their rows, in little memory.

Arrow reads through ranged reads of our own store, so that buckets have one client, one set of credentials and one way
to retry. A column is read through a buffer, never a row group at once: groups of any size can be read.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import InputChanged, PagemillError, PreconditionFailed, UsageError
from jobs.formats.arrow_types import cast
from jobs.storage import Store

MAX_GROUP_BYTES = 32 << 20
MAX_GROUP_ROWS = 50_000
"""A shard within a group is reached by decoding the group from its start: larger ones are cut by the planner first."""

_BATCH_BYTES = 2 << 20
_MAX_BATCH_ROWS = 1024
_MAX_ROWS_AT_ONCE = 64
"""Decoded by Arrow in one piece. How large they will be no file says: a value of a dictionary takes its room once in
the file, and once for each of its rows in memory."""
_ALL_BUFFERS = 64 << 20
_MAX_BUFFER, _MIN_BUFFER = 4 << 20, 64 << 10
# What Arrow raises for wrong bytes: names that are not UTF-8 are ValueErrors, lengths that are absurd the last two.
_BROKEN = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class ParquetFacts(NamedTuple):
    """What a file says of itself."""

    rows: int
    schema: pa.Schema
    has_large_groups: bool


class RangedFile(io.RawIOBase):
    """One version of an object as a file that can be read anywhere. `label` is for errors."""

    def __init__(self, store: Store, url: str, size: int, etag: str, label: str) -> None:
        super().__init__()
        self._store = store
        self._url = url
        self._size = size
        self._etag = etag
        self._label = label
        self._position = 0
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._position + size, self._size)
        if end <= self._position:
            return b""
        try:
            data = self._store.read(self._url, self._position, end, self._etag)
        except PreconditionFailed as error:
            self.error = InputChanged(
                f"{self._label} has changed since the job was submitted.",
                hint="Submit the job again, and leave its input alone while it runs.",
            )
            raise self.error from error
        except PagemillError as error:
            self.error = error
            raise
        self._position = end
        return data


class ParquetReader:
    """An open file; `columns` are those of the schema that the file has, all for None."""

    def __init__(self, file: RangedFile, label: str, columns: Sequence[str] | None = None) -> None:
        self._file = file
        self._label = label
        with self.explained():
            head = pq.read_metadata(pa.PythonFile(file, mode="r"))
            share = _ALL_BUFFERS // max(head.num_columns, 1)
            self._parquet = pq.ParquetFile(
                pa.PythonFile(file, mode="r"),
                metadata=head,
                pre_buffer=False,
                buffer_size=min(max(share, _MIN_BUFFER), _MAX_BUFFER),
            )
            self.schema = self._parquet.schema_arrow
        self._columns = None if columns is None else [name for name in self.schema.names if name in set(columns)]

    def facts(self) -> ParquetFacts:
        meta = self._parquet.metadata
        with self.explained():
            groups = [meta.row_group(group) for group in range(meta.num_row_groups)]
            large = any(
                group.num_rows > MAX_GROUP_ROWS or (group.num_rows > 1 and group.total_byte_size > MAX_GROUP_BYTES)
                for group in groups
            )
        return ParquetFacts(meta.num_rows, self.schema, large)

    def batches(self, start: int, end: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows [start, end) in batches of a few megabytes, each with the number of its first row."""
        meta = self._parquet.metadata
        counts = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
        for group, first in enumerate(accumulate(counts[:-1], initial=0)):
            if first + counts[group] <= start or not counts[group]:
                continue
            if first >= end:
                return
            yield from self._group_batches(group, first, start, end)

    def _group_batches(self, group: int, first: int, start: int, end: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        meta = self._parquet.metadata.row_group(group)
        # Of all columns, and not of those that are read: to ask a damaged file for those ends the process.
        size = min(max(_BATCH_BYTES * meta.num_rows // max(meta.total_byte_size, 1), 1), _MAX_ROWS_AT_ONCE)
        with self.explained():
            for batch in _joined(
                self._parquet.iter_batches(size, row_groups=[group], columns=self._columns, use_threads=False)
            ):
                skip = max(start - first, 0)
                if skip < batch.num_rows:
                    yield first + skip, batch.slice(skip, min(end, first + batch.num_rows) - first - skip)
                first += batch.num_rows
                if first >= end:
                    return

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns what Arrow makes of a file into what the store said of it, or into `corrupt_input`."""
        try:
            yield
        except _BROKEN as error:
            if self._file.error is not None:
                raise self._file.error from error
            raise PagemillError(
                f"{self._label} is no whole Parquet file: {error}",
                code="corrupt_input",
                hint="Make or copy the file again.",
            ) from error


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches, where they are small: each batch has a cost of its own."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _MAX_BATCH_ROWS or size >= _BATCH_BYTES:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def common_schema(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """The columns of all files: a column that one lacks, or has nothing but nulls in, is null there.

    Raises UsageError naming the file whose columns do not go with those of the files before.
    """
    label, merged = schemas[0]
    for label, schema in schemas:
        repeated = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if repeated is not None:
            raise UsageError(f"{label} has two columns called '{repeated}'.", hint="Rename one of them.")
        try:
            merged = pa.unify_schemas([merged, schema.remove_metadata()])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(
                f"{label} has other columns than the files before it: {error}",
                hint="Submit files of other columns as a job of their own.",
            ) from error
    return pa.schema([field.with_nullable(True) for field in merged])


def aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of the schema, in its order; a column that it lacks is null."""
    arrays = []
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        if place < 0:
            arrays.append(pa.nulls(batch.num_rows, field.type))
            continue
        arrays.append(cast(batch.column(place), field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
