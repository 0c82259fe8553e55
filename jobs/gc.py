"""Collecting what nobody refers to any more: segments that lost, submits that broke off, writes that never ended.

Only jobs that have ended are touched, and of those only what is older than a limit and is named neither by their
manifest nor, where a job failed and has none, by their commit records. A job of which the ledger has not heard is left
alone: it may be lost, and `pagemill recover` needs all of it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from jobs.errors import ObjectNotFound, StorageError
from jobs.layout import JobLayout, jobs_prefix
from jobs.ledger import Ledger
from jobs.records import TERMINAL, Manifest, SegmentRecord
from jobs.source import Source
from jobs.storage import StoredObject, Stores, UnfinishedWrite

_BATCH = 500

Kind = Literal["segment", "input", "submit", "probe", "write", "job"]


@dataclass(frozen=True, slots=True)
class Garbage:
    """One object, or one unfinished write, that may go; `job_id` is None for what is no job's.

    Kinds: `segment`, an attempt's object that is not the result; `input`, a copy of the input that was not used, by a
    submit that was repeated or a planner that stopped; `submit`, what a submit left that never entered its
    job; `probe`, what `pagemill doctor` left; `write`, what an unfinished write holds; `job`, an object of a job that
    is removed as a whole.
    """

    kind: Kind
    job_id: str | None
    what: StoredObject | UnfinishedWrite


class Collector:
    """Finds garbage below one storage URL. `before` and `jobs_before` are Unix seconds; None keeps all jobs."""

    def __init__(
        self, storage_url: str, ledger: Ledger, stores: Stores, *, before: float, jobs_before: float | None = None
    ) -> None:
        self._url = storage_url
        self._ledger = ledger
        self._stores = stores
        self._before = before
        self._jobs_before = jobs_before
        self._needed = self._needed_jobs()
        self.unlisted: str | None = None
        """Why unfinished writes could not be listed, if so."""

    def collect(self) -> Iterator[Garbage]:
        """Remove all that `find` finds, and yield it.

        Of a whole job its spec goes first and its ledger entry last: whatever is interrupted, what is left is no job
        that a recovery would run again, and the next collection finds it.
        """
        found = self.find()
        while some := list(islice(found, _BATCH)):
            urls = [one.what.url for one in some if isinstance(one.what, StoredObject)]
            specs = [url for url in urls if url.endswith("/job.json")]
            self._stores.delete(specs)
            self._stores.delete(url for url in urls if url not in specs)
            for one in some:
                if isinstance(one.what, UnfinishedWrite):
                    self._stores.discard(one.what)
            yield from some
        for job_id in self._ledger.job_ids(None) if self._jobs_before is not None else ():
            if self._is_outdated(job_id):
                self._ledger.forget(job_id)

    def find(self) -> Iterator[Garbage]:
        """All that may go, whole jobs with their spec first."""
        for job_id in self._stores.folders(jobs_prefix(self._url)):
            yield from self._of_job(job_id)
        for item in self._old(f"{self._url}/doctor/"):
            yield Garbage("probe", None, item)
        try:
            yield from self._unfinished()
        except StorageError as error:
            self.unlisted = str(error)

    def _of_job(self, job_id: str) -> Iterator[Garbage]:
        layout = JobLayout(self._url, job_id)
        state = self._ledger.state(job_id)
        if state is None:
            yield from self._broken_submit(layout)
        elif state in TERMINAL:
            if self._is_outdated(job_id):
                yield from self._whole_job(layout)
            else:
                yield from self._lost_segments(layout)
                yield from self._unused_inputs(layout)

    def _broken_submit(self, layout: JobLayout) -> Iterator[Garbage]:
        """The spec is written last: a folder without one is of no job, unless a submit is still at it."""
        items = list(self._stores.stored(f"{layout.root}/"))
        if all(item.modified < self._before and item.url != layout.spec for item in items):
            for item in items:
                yield Garbage("submit", layout.job_id, item)

    def _lost_segments(self, layout: JobLayout) -> Iterator[Garbage]:
        results = self._results(layout)
        for item in self._old(layout.attempts):
            if item.url not in results:
                yield Garbage("segment", layout.job_id, item)

    def _unused_inputs(self, layout: JobLayout) -> Iterator[Garbage]:
        used = {file.url for file in self._ledger.spec(layout.job_id).input.files}
        with suppress(ObjectNotFound):
            source = Source.model_validate_json(self._stores.read(layout.source))
            used |= {extent.url for extent in source.extents}
        for item in self._old(layout.inputs):
            if item.url not in used:
                yield Garbage("input", layout.job_id, item)

    def _whole_job(self, layout: JobLayout) -> Iterator[Garbage]:
        items = self._stores.stored(f"{layout.root}/")
        for item in sorted(items, key=lambda item: item.url != layout.spec):
            yield Garbage("job", layout.job_id, item)

    def _results(self, layout: JobLayout) -> set[str]:
        """The URLs of the objects that are a job's results, with their records."""
        try:
            manifest = Manifest.model_validate_json(self._stores.read(layout.manifest))
        except ObjectNotFound:
            records = self._ledger.records(layout.job_id)
            segments = [(shard, record) for shard, record in records.items() if isinstance(record, SegmentRecord)]
        else:
            segments = [(segment.shard, segment.record) for segment in manifest.segments]
        urls = {layout.record(shard, record.fence, record.attempt) for shard, record in segments}
        return urls | {part.url for shard, record in segments for part in record.objects(layout, shard) if part}

    def _unfinished(self) -> Iterator[Garbage]:
        prefix = jobs_prefix(self._url)
        for write in self._stores.unfinished(f"{self._url}/"):
            inside = write.url.startswith(prefix)
            job_id = write.url.removeprefix(prefix).partition("/")[0] if inside else None
            state = self._ledger.state(job_id) if job_id else None
            if write.started < self._before and (state is None or state in TERMINAL):
                yield Garbage("write", job_id, write)

    def _old(self, prefix_url: str) -> Iterator[StoredObject]:
        return (item for item in self._stores.stored(prefix_url) if item.modified < self._before)

    def _is_outdated(self, job_id: str) -> bool:
        if self._jobs_before is None or job_id in self._needed or self._ledger.spec(job_id).storage_url != self._url:
            return False
        ended_at = self._ledger.view(job_id).ended_at
        return ended_at is not None and ended_at < self._jobs_before

    def _needed_jobs(self) -> set[str]:
        """Jobs that others retry, whose answers are part of the others' results, or whose files live ones read."""
        needed: set[str] = set()
        if self._jobs_before is None:
            return needed
        live = set(self._ledger.live_jobs())
        prefix = jobs_prefix(self._url)
        for job_id in self._ledger.job_ids(None):
            spec = self._ledger.spec(job_id)
            needed |= {spec.parent.job_id, spec.parent.origin} if spec.parent else set()
            if job_id in live:
                urls = [file.url for file in spec.input.files if file.url.startswith(prefix)]
                needed |= {url.removeprefix(prefix).partition("/")[0] for url in urls}
        return needed
