"""What a job cost and where its time went, from the ledger's times and its segments' records.

    worker a   | shard 0 ------------ | shard 2 ---------- |                  a worker holds several shards at once: its
               | shard 1 ----- | shard 4 ------------------------ |           slots. Occupancy is the share of slot-time
    worker b   | shard 3 ------------------- |                                with a shard in it; the tail begins when
                                       tail  ^ . . . . . . . . . .^           the last shard has begun

Only the attempts whose segments are results are known. What others cost that were lost on the way is not in it, nor
the loading of models.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jobs.errors import ObjectNotFound
from jobs.ledger import Ledger
from jobs.records import EngineLoad, JobView, Manifest, SegmentRecord, Usage
from jobs.spec import JobSpec
from jobs.storage import Stores

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a job's life, in seconds; None where it has not ended, or was not recorded."""

    validating: float | None
    waiting: float | None
    in_progress: float | None
    finalizing: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """What the workers did. Times are in seconds, shares between 0 and 1.

    `span` is from the first shard's begin to the last one's end; `worker_seconds` is the sum over workers of the time
    with at least one shard; `slots` is how many shards they held at once at most, and `occupancy` the share of their
    slot-time with a shard. `tail` is how long no further shard began, and `tail_idle` the share of slot-time in it
    without a shard. `load` is the engines' in the mean over the shards' time; None where no record has one.
    """

    workers: int
    slots: int
    span: float
    worker_seconds: float
    occupancy: float
    tail: float
    tail_idle: float
    tokens_per_second: float
    rows_per_second: float
    load: EngineLoad | None


@dataclass(frozen=True, slots=True)
class Report:
    job_id: str
    state: str
    model: str
    rows: int | None
    ok: int
    failed: int
    failures: dict[str, int]
    usage: Usage
    shards: int | None
    settled: int
    phases: Phase
    work: Work | None
    engines: tuple[str, ...]
    gpu_hours: float | None
    cost: float | None

    def as_dict(self) -> dict[str, Any]:
        work = asdict(self)["work"]
        if self.work and self.work.load:
            work["load"] = self.work.load.model_dump()
        return {**asdict(self), "work": work}


def report(spec: JobSpec, ledger: Ledger, stores: Stores, gpu_hour_price: float | None = None) -> Report:
    """The report of a job in any state. `work` is None until a shard is committed by a worker that says when.

    A GPU hour is an hour of one worker with at least one shard of the job; the price is of one such hour.
    """
    view = ledger.view(spec.id)
    segments = _segments(spec, ledger, stores, view)
    failures: Counter[str] = Counter()
    for segment in segments:
        failures.update(segment.failures)
    work = _work(segments)
    hours = None if work is None else work.worker_seconds / 3600
    return Report(
        job_id=view.id,
        state=view.state,
        model=view.model,
        rows=view.rows,
        ok=view.done,
        failed=view.failed,
        failures=dict(failures.most_common()),
        usage=view.usage,
        shards=view.shards,
        settled=view.settled,
        phases=Phase(
            validating=_between(view.created_at, view.in_progress_at),
            waiting=_between(view.in_progress_at, view.started_at),
            in_progress=_between(view.started_at, view.finalizing_at),
            finalizing=_between(view.finalizing_at, view.ended_at),
        ),
        work=work,
        engines=tuple(sorted({segment.engine for segment in segments if segment.engine})),
        gpu_hours=hours,
        cost=None if hours is None or gpu_hour_price is None else hours * gpu_hour_price,
    )


def _segments(spec: JobSpec, ledger: Ledger, stores: Stores, view: JobView) -> list[SegmentRecord]:
    """The manifest's, which has those of dead shards too; where there is none yet, the committed ones."""
    if view.terminal:
        try:
            manifest = Manifest.model_validate_json(stores.read(spec.layout.manifest))
            return [segment.record for segment in manifest.segments]
        except ObjectNotFound:
            pass  # a job that failed
    return [record for record in ledger.records(spec.id).values() if isinstance(record, SegmentRecord)]


def _between(start: int | None, end: int | None) -> float | None:
    return None if start is None or end is None else float(end - start)


def _work(segments: Sequence[SegmentRecord]) -> Work | None:
    held: defaultdict[str, list[Interval]] = defaultdict(list)
    tokens = rows = 0
    for segment in segments:
        if segment.started_at is not None and segment.finished_at is not None:
            held[segment.worker].append((segment.started_at, segment.finished_at))
            tokens += segment.usage.prompt_tokens + segment.usage.completion_tokens
            rows += segment.ok + segment.failed
    if not held:
        return None
    intervals = [interval for of_worker in held.values() for interval in of_worker]
    begin, end = min(start for start, _ in intervals), max(end for _, end in intervals)
    span = max(end - begin, 1e-3)
    slots = sum(_most_at_once(of_worker) for of_worker in held.values())
    tail_begin = max(start for start, _ in intervals)
    tail = max(end - tail_begin, 1e-3)
    return Work(
        workers=len(held),
        slots=slots,
        span=span,
        worker_seconds=sum(_covered(of_worker) for of_worker in held.values()),
        occupancy=sum(end - start for start, end in intervals) / (slots * span),
        tail=tail,
        tail_idle=1 - sum(max(end - max(start, tail_begin), 0) for start, end in intervals) / (slots * tail),
        tokens_per_second=tokens / span,
        rows_per_second=rows / span,
        load=_mean_load(segments),
    )


def _mean_load(segments: Sequence[SegmentRecord]) -> EngineLoad | None:
    weighted = [
        (segment.load, segment.finished_at - segment.started_at)
        for segment in segments
        if segment.load and segment.started_at is not None and segment.finished_at is not None
    ]
    total = sum(seconds for _, seconds in weighted)
    if not total:
        return None
    return EngineLoad(
        rows=sum(load.rows * seconds for load, seconds in weighted) / total,
        seats=max(load.seats for load, _ in weighted),
        tail_idle=sum(load.tail_idle * seconds for load, seconds in weighted) / total,
    )


def _most_at_once(intervals: Iterable[Interval]) -> int:
    # Of an end and a begin at the same instant the end comes first: the slot went from one shard to the next.
    changes = sorted((at, change) for start, end in intervals for at, change in ((start, 1), (end, -1)))
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return max(most, 1)


def _covered(intervals: Iterable[Interval]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
