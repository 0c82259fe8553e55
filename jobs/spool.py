"""A segment while it grows: the output and the error lines of a shard in temporary files, and then in storage."""

import gzip
import hashlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import pyarrow as pa

from jobs.errors import RowError
from jobs.failpoints import failpoint
from jobs.formats.parquet_out import parquet_writer, write_group
from jobs.ledger import Lease
from jobs.output import OutputCompression
from jobs.planner import PlannedRow
from jobs.records import EngineLoad, Part, SegmentRecord, Usage
from jobs.results import Outcome, error_line, output_line
from jobs.rows import Row
from jobs.spec import JobSpec
from jobs.storage import Store
from jobs.table import OutputTable, output_schema

_GROUP_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kept:
    """What another job answered to a row: its line in the output, or what `table.answers_in` found there."""

    written: bytes | dict[str, Any]
    usage: Usage


class _Output(Protocol):
    """One attempt's part of the output: `count` rows of it, whole in the file at `path` once it is finished."""

    path: Path
    count: int

    def add(self, planned: PlannedRow, outcome: Outcome) -> None: ...

    def keep(self, planned: PlannedRow, kept: Kept) -> None: ...

    def finish(self) -> None:
        """Write what is held, and close. May be repeated."""

    def close(self) -> None: ...


class _Lines:
    """JSON lines in a file; compressed ones are one whole member or frame, so that files can be joined as they are."""

    def __init__(self, path: Path, compression: OutputCompression | None = None) -> None:
        self.path = path
        self.count = 0
        self._file = _opened(path, compression)

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self.count += 1

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()


class _LinesOutput(_Lines):
    def __init__(self, path: Path, spec: JobSpec) -> None:
        super().__init__(path, spec.output.compression)
        self._spec = spec

    def add(self, planned: PlannedRow, outcome: Outcome) -> None:
        line = output_line(self._spec, planned.index, planned.line, _row(planned), outcome)
        if line is not None:
            self.write(line)

    def keep(self, planned: PlannedRow, kept: Kept) -> None:
        if not isinstance(kept.written, bytes):
            raise TypeError("columns for an output of lines")
        self.write(kept.written)


class _ParquetOutput:
    def __init__(self, path: Path, spec: JobSpec, schema: pa.Schema) -> None:
        self.path = path
        self.count = 0
        self._table = OutputTable(spec, schema)
        self._writer = parquet_writer(path, schema)

    def add(self, planned: PlannedRow, outcome: Outcome) -> None:
        self._table.add(planned.index, planned.line, planned.row, outcome)
        self._count_one()

    def keep(self, planned: PlannedRow, kept: Kept) -> None:
        if isinstance(kept.written, bytes):
            raise TypeError("a line for an output of columns")
        self._table.keep(planned.line, planned.row, kept.written)
        self._count_one()

    def _count_one(self) -> None:
        self.count += 1
        if self._table.size >= _GROUP_BYTES:
            write_group(self._writer, self._table.take())

    def finish(self) -> None:
        if self._table.rows:
            write_group(self._writer, self._table.take())
        self.close()

    def close(self) -> None:
        self._writer.close()


class Spool:
    """The results of one attempt at a shard, in row order. Its files are gone at the end of the `with` block.

    Opening one reads the columns of a Parquet output from storage, and raises what that raises.
    """

    def __init__(self, spec: JobSpec, stores: Store) -> None:
        self._spec = spec
        self._stores = stores
        schema = output_schema(spec, stores) if spec.output.format == "parquet" else None
        self._folder = tempfile.TemporaryDirectory(prefix="pagemill-spool-")
        folder = Path(self._folder.name)
        path = folder / f"output{spec.output.suffix}"
        self._output: _Output = _LinesOutput(path, spec) if schema is None else _ParquetOutput(path, spec, schema)
        self._errors = _Lines(folder / "errors.jsonl")
        self._usage = Usage()
        self._failures: Counter[str] = Counter()
        self._started_at = time.time()
        self._finished_at: float | None = None
        self.ok = 0
        self.failed = 0

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, planned: PlannedRow, outcome: Outcome) -> None:
        self._output.add(planned, outcome)
        if isinstance(outcome, RowError):
            self._errors.write(error_line(self._spec, planned.index, planned.line, _row(planned), outcome))
            self.failed += 1
            self._failures[outcome.code] += 1
            return
        self.ok += 1
        self._usage += outcome.usage

    def keep(self, planned: PlannedRow, kept: Kept) -> None:
        """Add a row whose answer another job has already."""
        self._output.keep(planned, kept)
        self.ok += 1
        self._usage += kept.usage

    def put(self, lease: Lease, engine: str, worker: str = "", load: EngineLoad | None = None) -> SegmentRecord:
        """Put the segment under the attempt's own keys, and return the record to commit. May be repeated.

        The record is put too, last: where it is, both parts are, and a ledger that was lost finds them by it.
        """
        shard, fence, attempt = lease.shard.index, lease.fence, lease.attempt
        self._finished_at = self._finished_at or time.time()
        times = {"started_at": self._started_at, "finished_at": self._finished_at}
        by = {"engine": engine, "worker": worker, "load": load}
        failpoint("segment.begun")
        record = self.put_parts(shard, fence, attempt).model_copy(update={**by, **times})
        failpoint("segment.put")
        self._stores.put(self._spec.layout.record(shard, fence, attempt), record.model_dump_json().encode())
        return record

    def put_parts(self, shard: int, fence: int, attempt: str) -> SegmentRecord:
        """Put the segment without its record, which is returned: nobody but the caller learns of it."""

        def put(file: _Output | _Lines, which: str, suffix: str) -> Part | None:
            file.finish()
            if not file.count:
                return None
            url = self._spec.layout.segment(shard, fence, attempt, which, suffix)
            info = self._stores.put_file(url, file.path)
            return Part(size=info.size, etag=info.etag, sha256=_sha256(file.path), lines=file.count, suffix=suffix)

        return SegmentRecord(
            attempt=attempt,
            fence=fence,
            ok=self.ok,
            failed=self.failed,
            usage=self._usage,
            output=put(self._output, "", self._spec.output.suffix),
            errors=put(self._errors, ".errors", ".jsonl"),
            failures=dict(self._failures),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._output.close()
            self._errors.close()
        finally:
            self._folder.cleanup()


def _row(planned: PlannedRow) -> Row | None:
    return planned.row if isinstance(planned.row, Row) else None


def _opened(path: Path, compression: OutputCompression | None) -> IO[bytes] | pa.NativeFile:
    match compression:
        case None:
            return path.open("wb")
        case "gzip":
            return gzip.GzipFile(path, "wb", compresslevel=6, mtime=0)
        case "zstd":
            return pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
