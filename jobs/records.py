"""What the ledger and the manifest say of finished work."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from jobs.errors import RowError
from jobs.layout import JobLayout
from jobs.storage import ObjectInfo

JobState = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"
]
TERMINAL: frozenset[str] = frozenset({"completed", "failed", "cancelled", "expired"})


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


# Not a model: rows have one each, which the checks of a model would make dear.
@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; the cached ones are among the prompt's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )


class Part(_Frozen):
    """One object of a segment: its output, or its error lines. `lines` counts rows where it is Parquet."""

    size: int
    etag: str
    sha256: str
    lines: int
    suffix: str = ".jsonl"


class EngineLoad(_Frozen):
    """How full the engine was: sequences in a step in the mean, and how many it has seats for.

    `tail_idle` is the share of all seats in all steps that stood empty while no sequence waited for one: the tail.
    """

    rows: float
    seats: int
    tail_idle: float = 0.0


class SegmentRecord(_Frozen):
    """The commit record of a shard: which attempt's segment is its result, and what that holds.

    `engine` names what computed it (model, dtype), so that a result mixed from two kinds of workers shows. `failures`
    counts the failed rows by code. The times, in Unix seconds, are the attempt's, from its lease to its last row, and
    `load` is the engine's between them, with the rows of all shards that it had.
    """

    attempt: str
    fence: int
    ok: int
    failed: int
    usage: Usage = Usage()
    output: Part | None = None
    errors: Part | None = None
    engine: str = ""
    worker: str = ""
    failures: dict[str, int] = {}
    started_at: float | None = None
    finished_at: float | None = None
    load: EngineLoad | None = None

    def objects(self, layout: JobLayout, shard: int) -> tuple[ObjectInfo | None, ObjectInfo | None]:
        """The output object and the error object, as they were when they were put; None where there are no lines."""

        def info(part: Part | None, which: str) -> ObjectInfo | None:
            if part is None:
                return None
            url = layout.segment(shard, self.fence, self.attempt, which, part.suffix)
            return ObjectInfo(url, part.size, part.etag)

        return info(self.output, ""), info(self.errors, ".errors")


class DeadShard(_Frozen):
    """The commit record of a shard that was tried too often: each of its rows is an error.

    `fault` is why it was put back last; one whose workers all died never said.
    """

    dead: Literal[True]
    tries: int
    fault: str | None = None


_RECORD: TypeAdapter[SegmentRecord | DeadShard] = TypeAdapter(SegmentRecord | DeadShard)


def load_record(data: str) -> SegmentRecord | DeadShard:
    return _RECORD.validate_json(data)


class ManifestSegment(_Frozen):
    shard: int
    first_row: int
    rows: int
    record: SegmentRecord


class ResultFile(_Frozen):
    url: str
    size: int
    lines: int


class Column(_Frozen):
    """A column of an output, with its Arrow type; "json" where lines hold values of several types."""

    name: str
    type: str


class DatasetPart(_Frozen):
    """One file of a folder of parts."""

    name: str
    rows: int
    bytes: int
    sha256: str


class DatasetManifest(_Frozen):
    """What a folder of parts holds, written when all are there. `columns` are None for JSON lines of too many."""

    job_id: str
    format: Literal["jsonl", "parquet"]
    rows: int
    bytes: int
    ok: int
    failed: int
    usage: Usage
    columns: tuple[Column, ...] | None = Field(serialization_alias="schema")
    parts: tuple[DatasetPart, ...]


class Manifest(_Frozen):
    """The truth about a finished job: readers need nothing else. It lists exactly one segment a shard, in order.

    A job that was stopped has no segment for the shards that it did not come to. Their rows are neither `ok` nor
    `failed`, and stand in the error file and the remaining file.

    The times are those of `JobView`; `ended_at` is when the results were joined.
    """

    job_id: str
    spec_fingerprint: str
    state: JobState
    rows: int
    ok: int
    failed: int
    usage: Usage
    output: ResultFile
    errors: ResultFile | None
    remaining: str | None
    engines: tuple[str, ...]
    segments: tuple[ManifestSegment, ...]
    in_progress_at: int | None = None
    started_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None


class JobView(_Frozen):
    """A job as people see it. Times are Unix seconds; `in_flight` rows are done in shards not yet committed. A job that
    retries another's failed rows names that one as its `parent`.

    It is in progress once it is planned, and started once a worker has its first shard.
    """

    id: str
    state: JobState
    model: str
    created_at: int
    tenant: str = "default"
    priority: int = 0
    weight: float = 1.0
    parent: str | None = None
    paused: bool = False
    expires_at: int | None = None
    rows: int | None = None
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    shards: int | None = None
    settled: int = 0
    leased: int = 0
    usage: Usage = Usage()
    in_progress_at: int | None = None
    started_at: int | None = None
    finalizing_at: int | None = None
    ended_at: int | None = None
    output_url: str = ""
    error_url: str | None = None
    remaining_url: str | None = None
    errors: tuple[RowError, ...] = ()
    error_count: int = 0
    reason: str | None = None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class WorkerView(_Frozen):
    """A live worker. `slots` is how many shards it has work for as a rule, `busy` how many it holds now."""

    id: str
    model: str
    slots: int
    busy: int
    host: str
    pid: int
    engine: str
    engine_pid: int | None = None
    engine_restarts: int = 0
    tokens_per_second: float = 0.0
