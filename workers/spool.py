"""A segment while it grows: output and error lines in temporary files, counted and hashed as they are written."""

import hashlib
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs.errors import RowError
from jobs.ledger import Lease
from jobs.records import Part, SegmentRecord, Usage
from jobs.results import Outcome, ResultLines
from jobs.spec import JobSpec
from jobs.storage import Stores


class _Lines:
    """One of the two files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self._count = 0

    def write(self, line: bytes | None) -> None:
        if line is not None:
            self._file.write(line)
            self._sha256.update(line)
            self._count += 1

    def put(self, stores: Stores, url: str) -> Part | None:
        """Put the lines under the URL, if there are any. Called again, it puts the same bytes again."""
        self._file.flush()
        if not self._count:
            return None
        info = stores.put_file(url, self.path)
        return Part(size=info.size, etag=info.etag, sha256=self._sha256.hexdigest(), lines=self._count)

    def close(self) -> None:
        self._file.close()


class Spool:
    """The result lines of one attempt at a shard, in row order. Its files are gone at the end of the `with` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pagemill-spool-")
        self._output = _Lines(Path(self._folder.name) / "output.jsonl")
        self._errors = _Lines(Path(self._folder.name) / "errors.jsonl")
        self._usage = Usage()
        self.ok = 0
        self.failed = 0

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def add(self, lines: ResultLines, outcome: Outcome) -> None:
        self._output.write(lines.output)
        self._errors.write(lines.error)
        if isinstance(outcome, RowError):
            self.failed += 1
            return
        self.ok += 1
        self._usage += outcome.usage

    def put(self, spec: JobSpec, lease: Lease, stores: Stores, engine: str) -> SegmentRecord:
        """Put the segment under the attempt's own keys, and return the record to commit. May be repeated.

        The record is put too, last: where it is, both parts are, and a ledger that was lost finds them by it.
        """
        shard, fence, attempt = lease.shard.index, lease.fence, lease.attempt
        record = SegmentRecord(
            attempt=attempt,
            fence=fence,
            ok=self.ok,
            failed=self.failed,
            usage=self._usage,
            output=self._output.put(stores, spec.layout.segment(shard, fence, attempt)),
            errors=self._errors.put(stores, spec.layout.segment(shard, fence, attempt, ".errors")),
            engine=engine,
        )
        stores.put(spec.layout.record(shard, fence, attempt), record.model_dump_json().encode())
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        self._errors.close()
        self._folder.cleanup()
