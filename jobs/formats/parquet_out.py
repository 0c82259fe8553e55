"""Parquet files as we write them: always the same settings, so that the same rows give the same bytes.

segment 0  | group | group |    segment 1  | group |            as workers wrote them, a few megabytes a group
joined     | group                                 |            decoded and written again, batch by batch
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.storage import ObjectWriter

_GROUP_BYTES = 64 * 1024 * 1024
_BATCH_BYTES = 8 * 1024 * 1024
_MAX_BATCH_ROWS = 16_384


class Sink:
    """An object that is being written, as a file for Arrow; counts and hashes what is written."""

    closed = False

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | pa.Buffer) -> int:
        piece = bytes(data)
        self._writer.write(piece)
        self._sha256.update(piece)
        self._size += len(piece)
        return len(piece)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """What is written is with the store's writer already."""

    def close(self) -> None:
        self.closed = True


def parquet_writer(where: Path | Sink, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of one file; a context manager, which writes the footer."""
    sink = where if isinstance(where, Sink) else str(where)
    return pq.ParquetWriter(sink, schema, version="2.6", compression="zstd", write_statistics=True)


def join(files: Iterable[Path], sink: Sink, schema: pa.Schema) -> None:
    """The rows of all files in one, in order; holds about 64 MiB of them at a time. Each file is read once."""
    held: list[pa.RecordBatch] = []
    size = 0
    with parquet_writer(sink, schema) as writer:
        for file in files:
            for batch in batches_of(file):
                held.append(batch)
                size += batch.nbytes
                if size >= _GROUP_BYTES:
                    write_group(writer, pa.Table.from_batches(held))
                    held, size = [], 0
        if held:
            write_group(writer, pa.Table.from_batches(held))


def write_group(writer: pq.ParquetWriter, table: pa.Table) -> None:
    """Write the table as one row group."""
    writer.write_table(table, row_group_size=table.num_rows)


def batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a file, a few megabytes at a time."""
    with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20) as file:
        meta = file.metadata
        size = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
        row = size // max(meta.num_rows, 1) + 1
        yield from file.iter_batches(batch_size=min(max(_BATCH_BYTES // row, 1), _MAX_BATCH_ROWS))
