"""What a planner does before it plans, where shards cannot be parts of the input's files as they are.

Files that are compressed, or CSV, are written once as JSON lines to the job's own storage, and Parquet with large row
groups as Parquet with small ones; of a sample, the key is found that parts its rows from the others. In order: the copy
is written under a name of its own, then `source.json` says where it is, if no other planner said so first. A stop
between the two leaves an object that nobody refers to.
"""

import heapq
import io
import math
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import ObjectNotFound, PagemillError, PreconditionFailed
from jobs.formats.compressed import decompressed
from jobs.formats.csv_rows import csv_to_jsonl
from jobs.formats.parquet import aligned
from jobs.lines import read_lines
from jobs.parquet_rows import columns_read, load_schema, open_parquet
from jobs.source import Extent, Piece, Source, direct, pinned_chunks, sample_key, source_of
from jobs.spec import InputFile, JobSpec
from jobs.storage import ObjectWriter, Store

_WRITE = 1 << 20
_GROUP_BYTES = 8 << 20
_GROUP_ROWS = 10_000
_DELIMITERS = {"csv": ",", "tsv": "\t"}


def prepare_source(spec: JobSpec, stores: Store, max_copy_bytes: int, on_progress: Callable[[int], None]) -> Source:
    """Where the job's rows lie, made ready if need be. `on_progress` hears the bytes of the copy, every megabyte.

    Raises InputChanged, and PagemillError for a file that is not whole, or is not what its name says, or where a copy
    as JSON lines has more than `max_copy_bytes` (`input_too_large`).
    """
    if spec.input.is_direct:
        return direct(spec.input)
    try:
        return source_of(spec, stores)
    except ObjectNotFound:
        pass
    source = direct(spec.input)
    if spec.input.regroup:
        source = _regrouped(spec, stores, source, on_progress)
    elif spec.input.needs_copy:
        source = _as_json_lines(spec, stores, source, max_copy_bytes, on_progress)
    if spec.input.sample is not None:
        source = source.model_copy(update={"keep": _highest_kept(spec, stores, source, spec.input.sample, on_progress)})
    try:
        stores.put_if_absent(spec.layout.source, source.model_dump_json().encode())
    except PreconditionFailed:
        stores.delete({extent.url for extent in source.extents} - {file.url for file in spec.input.files})
        return source_of(spec, stores)
    return source


def _regrouped(spec: JobSpec, stores: Store, source: Source, on_progress: Callable[[int], None]) -> Source:
    """The source, with the columns that are read of all files in one, in row groups of a few megabytes."""
    given = spec.input
    schema = load_schema(given.arrow_schema or "")
    schema = pa.schema([schema.field(name) for name in columns_read(given, schema)])
    limit = given.limit if given.limit is not None and given.where is None else source.end
    with stores.writer(spec.layout.copy_of_input(secrets.token_hex(16), ".parquet")) as sink:
        with pq.ParquetWriter(pa.PythonFile(_Sink(sink), mode="w"), schema, compression="zstd") as writer:
            for group in _groups(_all_batches(spec, stores, source, limit, schema)):
                writer.write_table(group)
                on_progress(0)
    copy = sink.info
    return Source(
        extents=tuple(
            Extent(copy.url, copy.etag, start, min(extent.size, max(limit - start, 0)))
            for start, extent in zip(source.starts, source.extents, strict=False)
        )
    )


def _all_batches(
    spec: JobSpec, stores: Store, source: Source, limit: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for piece in source.pieces(0, limit):
        for _, batch in open_parquet(spec, stores, source, piece.file).batches(piece.start, piece.end):
            yield aligned(batch, schema)


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches in groups of a few megabytes."""
    held: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        rows += batch.num_rows
        if size >= _GROUP_BYTES or rows >= _GROUP_ROWS:
            yield pa.Table.from_batches(held)
            held, size, rows = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


class _Sink(io.RawIOBase):
    """An object's writer as the file that Arrow writes to."""

    def __init__(self, writer: ObjectWriter) -> None:
        super().__init__()
        self._writer = writer
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._writer.write(bytes(data))
        self._size += len(data)
        return len(data)


def _as_json_lines(
    spec: JobSpec, stores: Store, source: Source, max_bytes: int, on_progress: Callable[[int], None]
) -> Source:
    """The source, with all files in it that have to be copied in one object."""
    originals = source.extents
    limit = spec.input.limit or math.inf
    spans: list[tuple[int, int]] = []
    end = rows = 0
    with stores.writer(spec.layout.copy_of_input(secrets.token_hex(16), ".jsonl")) as writer:
        for file, original in zip(spec.input.files, originals, strict=True):
            start = end
            pieces = _text(spec, stores, file, original) if _needs_copy(spec, file) else iter(())
            while rows < limit and (piece := next(pieces, None)) is not None:
                end += len(piece)
                if end > max_bytes:
                    raise _too_large(file, max_bytes)
                writer.write(piece)
                rows += _rows_at_least(piece)
                on_progress(end)
            spans.append((start, end - start))
    copy = writer.info
    return Source(
        extents=tuple(
            Extent(copy.url, copy.etag, *span) if _needs_copy(spec, file) else original
            for file, original, span in zip(spec.input.files, originals, spans, strict=True)
        )
    )


def _too_large(file: InputFile, max_bytes: int) -> PagemillError:
    return PagemillError(
        f"The input is more than {max_bytes:,} bytes as JSON lines; the limit was reached in {file.label}.",
        code="input_too_large",
        hint="Submit it in parts, or raise PAGEMILL_MAX_COPY_BYTES where the planner runs.",
    )


def _needs_copy(spec: JobSpec, file: InputFile) -> bool:
    return file.compression is not None or spec.input.format != "jsonl"


def _text(spec: JobSpec, stores: Store, file: InputFile, original: Extent) -> Iterator[bytes]:
    """The file as JSON lines."""
    chunks = pinned_chunks(stores, original, Piece(0, 0, file.size), lambda size: None)
    if file.compression is not None:
        chunks = decompressed(chunks, file.compression, file.label)
    if spec.input.format == "jsonl":
        return chunks
    return _batched(csv_to_jsonl(chunks, _DELIMITERS[spec.input.format], spec.max_line_bytes, file.label))


def _batched(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of a megabyte or more."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _WRITE:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


def _rows_at_least(piece: bytes) -> int:
    """How many rows surely end in a piece of the file: what is cut at its two ends may be blank."""
    return sum(1 for line in piece.split(b"\n")[1:-1] if line and not line.isspace())


def _highest_kept(
    spec: JobSpec, stores: Store, source: Source, count: int, on_progress: Callable[[int], None]
) -> int | None:
    """The highest key of the `count` rows with the lowest keys; None where there are no more rows than that."""
    kept: list[int] = []  # a heap of the lowest keys, negated: the highest of them is on top
    more = False
    for line in read_lines(spec, stores, source, 0, source.end, 1, on_progress):
        key = -sample_key(source.starts[line.file] + line.end, spec.input.sample_seed)
        if len(kept) < count:
            heapq.heappush(kept, key)
        else:
            more = True
            heapq.heappushpop(kept, key)
    return -kept[0] if more else None
