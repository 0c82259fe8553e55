"""What a job that was stopped has not done, as a file that can be submitted in place of its input.

JSON lines stay as they are, CSV and TSV become JSON lines that make the same requests, and Parquet stays Parquet, with
the columns that are passed on. It has the rows that were asked for and no others: `where`, `columns`, `limit` and
`sample` are not to be asked for again.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa

from jobs.formats.parquet_out import Sink, parquet_writer, write_group
from jobs.parquet_rows import columns_passed_on, read_batches
from jobs.planner import raw_lines
from jobs.rows import as_json_line
from jobs.shards import Shard
from jobs.source import source_of
from jobs.spec import JobSpec
from jobs.storage import Stores

_GROUP_BYTES = 8 << 20


def write_remaining(spec: JobSpec, stores: Stores, shards: Sequence[Shard] | None) -> str:
    """Write the rows of these shards, of a job that is not planned all for None; returns the URL of the file.

    Raises ObjectNotFound and InputChanged where the input is no longer the one that was submitted.
    """
    limit = spec.input.limit if shards is None else None
    if spec.input.format == "parquet":
        _write_table(spec, stores, shards, limit)
        return spec.layout.remaining_table
    with stores.writer(spec.layout.remaining) as writer:
        for line in islice(raw_lines(spec, stores, shards), limit):
            writer.write(line if spec.input.format == "jsonl" else as_json_line(line, spec))
    return spec.layout.remaining


def _write_table(spec: JobSpec, stores: Stores, shards: Sequence[Shard] | None, limit: int | None) -> None:
    schema = columns_passed_on(spec.input)
    with stores.writer(spec.layout.remaining_table) as writer:
        with parquet_writer(Sink(writer), schema) as table:
            for group in _groups(_batches(spec, stores, shards, limit)):
                write_group(table, pa.Table.from_batches(group, schema))


def _batches(
    spec: JobSpec, stores: Stores, shards: Sequence[Shard] | None, limit: int | None
) -> Iterator[pa.RecordBatch]:
    source = source_of(spec, stores)
    ranges = [(0, source.end)] if shards is None else [(shard.start, shard.end) for shard in shards]
    rows = 0
    for start, end in ranges:
        for found in read_batches(spec, stores, source, start, end):
            batch = found.batch if limit is None else found.batch.slice(0, limit - rows)
            rows += batch.num_rows
            yield batch
            if rows == limit:
                return


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
