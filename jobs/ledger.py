"""The ledger: which jobs there are, who works on which shard, and which segment is each shard's result.

    pm:jobs, pm:live          Z  job id -> created; all of them, and those that have not ended
    pm:queue:<model>...          whose turn it is: see lua/queue.lua
    pm:asked:<attempt>        S  the job of the shard that an attempt was given, for as long as its lease
    pm:deadlines              Z  job id -> when it expires, of those that do
    pm:outputs                H  URL -> the job that has not ended and writes there
    pm:worker:<id>            S  what a live worker says of itself, with an expiry;  pm:workers indexes them
    pm:swept, pm:sweeping     S  when jobs were last driven on, with an expiry: for people, and for the next sweep
    pm:{<job>}:job            H  state, spec, counters, times
             :ready           Z  shard -> its place in line; a paused job's are not handed out
             :at              H  worker -> the place in line of the shard that it was handed last, if in runs
             :leases          Z  shard -> expiry in ms by the server's clock
             :own             H  s:<shard> -> attempt, a:<attempt> -> shard, f:<shard> -> fence
             :commit          H  shard -> record; written once, never replaced
             :tries :faults   H  shard -> how often leased; why it was put back last
             :shards          H  shard -> its plan;  :progress  shard -> rows done in it
    pm:news:<job>                a channel: something was committed, or the job has ended

Every change is one Lua script that may be run twice: the client repeats a command whose reply was lost.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import redis
from redis.commands.core import Script
from redis.lock import Lock

from jobs.errors import LedgerFull, OutputTaken, RowError, UnreadableJob, UsageError
from jobs.ledger_fields import TERMS, counts, dump_errors, result_fields, spec_of, view_of
from jobs.records import (
    DeadShard,
    JobView,
    Manifest,
    SegmentRecord,
    WorkerView,
    load_record,
)
from jobs.shards import Plan, Shard, dump_shard, load_shard
from jobs.spec import JobSpec, load_spec, model_key

Verdict = Literal["ok", "superseded", "lost", "stop"]
Ending = Literal["completed", "cancelled", "expired"]

_TIMES = ("in_progress_at", "started_at", "finalizing_at")
_CHUNK = 500
_FREE = "Raise its maxmemory, or remove old jobs: `pagemill gc --jobs-older-than 7d`."
_FULL = 0.75
"""The share of Redis's memory up to which jobs are taken: what is in work needs the rest to come to its end."""
_UNDRIVEN = "no control worker plans, assembles and sweeps; start `pagemill worker --control`"


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt's right to commit one shard, while `fence` is the highest that was handed out for it.

    `tries` is how often the shard was handed out, this time among them, less what was given back.
    """

    spec: JobSpec
    shard: Shard
    attempt: str
    fence: int
    tries: int

    @property
    def job_id(self) -> str:
        return self.spec.id


@dataclass(frozen=True, slots=True)
class FairShare:
    """How shards are shared out within a priority, and how long a lower one waits at most.

    A tenant that is not listed has the weight 1. A priority that has had no shard for `patience` seconds comes first,
    at every fourth turn at most.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    patience: float = 600


EQUAL_SHARES = FairShare()


class Memory(NamedTuple):
    """The server's, in bytes; a `limit` of 0 is none."""

    used: int
    limit: int


def _lua(name: str) -> str:
    return files("jobs").joinpath("lua", f"{name}.lua").read_text()


class Ledger:
    """All changes to jobs, leases and commit records. Thread-safe; holds no state of its own."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        names = (
            "create",
            "add_shards",
            "adopt",
            "open",
            "lease",
            "beat",
            "commit",
            "release",
            "expire",
            "pause",
            "resume",
            "set",
            "cancel",
            "expire_job",
            "reopen",
            "finish",
            "forget",
        )
        queue = _lua("queue")
        self._scripts: dict[str, Script] = {name: client.register_script(queue + _lua(name)) for name in names}

    # --- a job's life -------------------------------------------------------------------------------------------

    def create(self, spec: JobSpec, *, paused: bool = False) -> bool:
        """Enter a job as `validating`. False if it is there already, as after a lost reply.

        Raises OutputTaken where a job that has not ended writes one of its files.
        """
        fields = {
            "spec": spec.model_dump_json(),
            "model": spec.model,
            "model_key": model_key(spec.model),
            "created_at": spec.created_at,
            "place": f"{spec.created_at:010}:{spec.id}",
            "tenant": spec.tenant,
            "priority": spec.priority,
            "weight": spec.weight,
            "max_tries": spec.max_tries,
            **({"paused": _now()} if paused else {}),
        }
        keys = [*self._keys(spec.id, "job"), "pm:jobs", "pm:live", "pm:deadlines", "pm:outputs"]
        deadline = "" if spec.expires_at is None else spec.expires_at
        args = [spec.id, time.time_ns() // 1_000_000, deadline, spec.output_url, spec.error_url, *_flat(fields)]
        match self._run("create", keys, args):
            case ["taken", url, holder]:
                raise OutputTaken(
                    f"Job {holder} writes {url}, and has not ended.",
                    hint=f"Name another output, or wait: `pagemill watch {holder}`.",
                )
            case reply:
                return bool(reply == ["ok"])

    def check_room(self, needed: int) -> None:
        """Raises LedgerFull where so many bytes more would leave too little room for the jobs that are there to end."""
        memory = self.memory()
        if memory.limit and memory.used + needed > _FULL * memory.limit:
            raise LedgerFull(
                f"Redis has {memory.used:,} of its {memory.limit:,} bytes in use, and new jobs are taken up to "
                f"{_FULL:.0%} of them.",
                hint=_FREE,
            )

    def add_shards(self, job_id: str, shards: Iterable[Shard]) -> str:
        """Put planned shards up; 'ok', or the state of a job that is no longer being planned."""
        waiting = iter(shards)
        while some := list(islice(waiting, _CHUNK)):
            args = [item for shard in some for item in (shard.index, shard.place, dump_shard(shard).decode())]
            if (reply := self._run("add_shards", self._keys(job_id, "job", "ready", "shards"), args)) != "ok":
                return cast(str, reply)
        return "ok"

    def adopt(self, job_id: str, segments: Mapping[int, SegmentRecord], fence: int) -> str:
        """Enter segments that another ledger's attempts left: see lua/adopt.lua. Call it after `add_shards`."""
        waiting = iter(sorted(segments.items()))
        while True:
            some = list(islice(waiting, _CHUNK))
            args = [item for shard, record in some for item in (shard, record.model_dump_json(), *counts(record))]
            reply = cast(str, self._run("adopt", self._keys(job_id, "job", "ready", "commit"), [fence, *args]))
            if reply != "ok" or len(some) < _CHUNK:
                return reply

    def open(
        self,
        spec: JobSpec,
        *,
        shards: int,
        rows: int,
        errors: Sequence[RowError],
        error_count: int,
        in_runs: bool = False,
    ) -> str:
        """The plan is complete: workers may lease, in runs of the line if `in_runs`.

        'ok', or the state that forbids it.
        """
        fields = {"rows": rows, "errors": dump_errors(errors), "error_count": error_count}
        if in_runs:
            fields["in_runs"] = 1
        return cast(str, self._run("open", self._keys(spec.id, "job"), [spec.id, shards, _now(), *_flat(fields)]))

    def fail(
        self, job_id: str, errors: Sequence[RowError], *, error_count: int, error_url: str | None, from_state: str
    ) -> str:
        """End a job that can give no result."""
        fields = {"errors": dump_errors(errors), "error_count": error_count, "error_url": error_url or ""}
        return self._finish(job_id, from_state, "failed", fields)

    def finish(self, manifest: Manifest, from_state: str) -> str:
        """End a job whose manifest is written. 'ok', or the state that forbids it.

        The manifest's counts replace the commits', which know nothing of the rows of dead shards.
        """
        return self._finish(manifest.job_id, from_state, manifest.state, result_fields(manifest), manifest.ended_at)

    def restore(self, manifest: Manifest, plan: Plan) -> str:
        """End a job that another ledger saw end, as its manifest says. 'ok', or the state that forbids it."""
        fields = {
            "rows": plan.rows,
            "total": len(plan.shards),
            "settled": len(manifest.segments),
            "errors": dump_errors(plan.first_errors),
            "error_count": plan.bad,
            **{name: at for name in _TIMES if (at := getattr(manifest, name)) is not None},
            **result_fields(manifest),
        }
        return self._finish(manifest.job_id, "validating", manifest.state, fields, manifest.ended_at)

    def forget(self, job_id: str) -> str:
        """Remove a job that has ended. 'ok', or the state of one that has not."""
        keys = self._keys(job_id, "ready", "leases", "own", "commit", "tries", "faults", "shards", "progress")
        return cast(str, self._run("forget", [self._key(job_id, "job"), "pm:jobs", "pm:live", *keys], [job_id]))

    def stall(self, job_id: str, reason: str) -> None:
        """Let people see why a job does not come to its end."""
        self.client.hset(self._key(job_id, "job"), "stalled", reason)

    def cancel(self, job_id: str) -> str:
        """Stop a job. 'ok', or the state that forbids it."""
        keys = self._keys(job_id, "job", "ready", "leases", "own", "progress")
        return cast(str, self._run("cancel", keys, [job_id, _now()]))

    def pause(self, job_id: str) -> str:
        """Hand out no more shards of a job; those in work are finished. 'ok', or the state that forbids it."""
        return cast(str, self._run("pause", self._keys(job_id, "job"), [job_id, _now()]))

    def resume(self, job_id: str) -> str:
        """Go on with a job that may be paused. 'ok', or the state that forbids it."""
        return cast(str, self._run("resume", self._keys(job_id, "job"), [job_id]))

    def set_terms(
        self,
        job_id: str,
        *,
        priority: int | None = None,
        weight: float | None = None,
        expires_at: int | Literal["never"] | None = None,
    ) -> str:
        """Change a job's place in the queue and its deadline; None leaves one as it is.

        'ok', or the state that forbids it.
        """
        given = ["" if value is None else value for value in (priority, weight, expires_at)]
        return cast(str, self._run("set", [self._key(job_id, "job"), "pm:deadlines"], [job_id, *given]))

    def overdue(self) -> list[str]:
        """The jobs whose deadline has passed by the server's clock, and that have not ended."""
        seconds, _ = self.client.time()
        return cast(list[str], self.client.zrangebyscore("pm:deadlines", "-inf", seconds))

    def expire_job(self, job_id: str) -> str:
        """Stop a job whose deadline has passed. 'ok', 'early', or the state that forbids it."""
        keys = [*self._keys(job_id, "job", "ready", "leases", "own", "progress"), "pm:deadlines"]
        return cast(str, self._run("expire_job", keys, [job_id, _now()]))

    def ending(self, job_id: str) -> Ending | None:
        """How a job will end that is `finalizing` or `cancelling`; None for one in any other state."""
        state, ending = cast(list[str | None], self.client.hmget(self._key(job_id, "job"), ["state", "ending"]))
        if state == "finalizing":
            return "expired" if ending else "completed"
        return "cancelled" if state == "cancelling" else None

    def joined_at(self, job_id: str) -> int:
        """When the results of a job were first joined, in Unix seconds: the same for all who assemble it."""
        job = self._key(job_id, "job")
        self.client.hsetnx(job, "joined_at", str(_now()))
        return int(cast(str, self.client.hget(job, "joined_at")))

    def reopen(self, spec: JobSpec, shard: int, record: SegmentRecord) -> bool:
        """Run a shard again whose committed segment has vanished from storage."""
        raw = self.client.hget(self._key(spec.id, "commit"), str(shard))
        if raw is None or load_record(cast(str, raw)) != record:
            return False
        keys = self._keys(spec.id, "job", "ready", "commit", "tries")
        return bool(self._run("reopen", keys, [spec.id, shard, raw, *counts(record)]))

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(
        self,
        model: str,
        attempt: str,
        ttl: float,
        share: FairShare = EQUAL_SHARES,
        *,
        worker: str = "",
        left_to_each: int = 0,
    ) -> Lease | None:
        """The next shard of the model's jobs, or None if none is ready.

        Raises UnreadableJob where it is of a job that this version cannot read; it is left to others.

        The highest priority comes first, then the tenant, and then the job, that has had the fewest shards for its
        weight, then the oldest job: see lua/queue.lua. Of the job, the first shard in line, or where neighbours have
        prefixes in common, the one after what the `worker` has had: see lua/lease.lua. None as well where the job has
        not more than `left_to_each` shards ready for each other worker there is.
        """
        args = [model_key(model), attempt, _ms(ttl), _now(), _ms(share.patience), worker, left_to_each]
        args += _flat(dict(share.weights))
        reply = self._run("lease", [], args)
        if reply[0] == "empty":
            return None
        _, job_id, spec, shard, fence, plan, tries = reply
        try:
            job = load_spec(spec, f"What the ledger has of job {job_id}")
            return Lease(job, load_shard(plan), attempt, int(fence), int(tries))
        except UnreadableJob as error:
            self._release(job_id, shard, attempt, str(error), counts=False)
            raise

    def beat(self, leases: Sequence[tuple[Lease, int]], ttl: float) -> list[Verdict]:
        """Keep leases alive, each with the rows done in it; one round trip for all."""
        if not leases:
            return []
        pipe = self.client.pipeline(transaction=False)
        for lease, rows_done in leases:
            keys = self._keys(lease.job_id, "job", "leases", "own", "progress")
            self._scripts["beat"](keys=keys, args=[lease.shard.index, lease.attempt, _ms(ttl), rows_done], client=pipe)
        return cast(list[Verdict], pipe.execute())

    def commit(self, lease: Lease, record: SegmentRecord) -> Verdict:
        """Make the lease's segment the result of its shard: see lua/commit.lua."""
        keys = self._keys(lease.job_id, "job", "leases", "own", "commit", "progress", "faults")
        args = [lease.job_id, lease.shard.index, lease.attempt, record.model_dump_json(), _now(), *counts(record)]
        return cast(Verdict, self._run("commit", keys, args))

    def give_back(self, lease: Lease, fault: str = "") -> bool:
        """Put the shard back because this worker was asked to stop, or has a fault of its own, which people can see.

        The try does not count.
        """
        return self._release(lease.job_id, lease.shard.index, lease.attempt, fault, counts=False)

    def release(self, lease: Lease, fault: str, rest: float = 0) -> bool:
        """Put the shard back because this try failed; the try counts, and people can see the fault.

        It is ready again after `rest` seconds, twice as long after each further try: what failed may be mended by then.
        """
        return self._release(lease.job_id, lease.shard.index, lease.attempt, fault or "unknown fault", rest)

    def complain(self, lease: Lease, fault: str) -> None:
        """Let people see why a shard makes no progress, while it is worked on."""
        self.client.hset(self._key(lease.job_id, "faults"), str(lease.shard.index), fault)

    def expire(self, job_id: str, limit: int = 1000) -> tuple[int, int, int]:
        """Take back shards whose leases ran out: (expired, ready, leased)."""
        keys = self._keys(job_id, "job", "ready", "leases", "own", "progress")
        expired, ready, leased = self._run("expire", keys, [job_id, limit])
        return int(expired), int(ready), int(leased)

    # --- questions ----------------------------------------------------------------------------------------------

    def spec(self, job_id: str) -> JobSpec:
        """The job on the terms that it has now. Raises UsageError for a job that is not there."""
        names = ["spec", *TERMS]
        found = cast(list[str | None], self.client.hmget(self._key(job_id, "job"), names))
        fields = {name: value for name, value in zip(names, found, strict=True) if value is not None}
        if "spec" not in fields:
            raise _no_such_job(job_id)
        return spec_of(fields)

    def model(self, job_id: str) -> str:
        """Of a job that this version cannot read too. Raises UsageError for one that is not there."""
        if (model := self.client.hget(self._key(job_id, "job"), "model")) is None:
            raise _no_such_job(job_id)
        return cast(str, model)

    def state(self, job_id: str) -> str | None:
        return cast(str | None, self.client.hget(self._key(job_id, "job"), "state"))

    def records(self, job_id: str) -> dict[int, SegmentRecord | DeadShard]:
        """The commit records of a job by shard."""
        found = cast(dict[str, str], self.client.hgetall(self._key(job_id, "commit")))
        return {int(shard): load_record(data) for shard, data in found.items()}

    def record(self, job_id: str, shard: int) -> SegmentRecord | DeadShard | None:
        """The commit record of one shard, if it is settled."""
        data = cast(str | None, self.client.hget(self._key(job_id, "commit"), str(shard)))
        return None if data is None else load_record(data)

    def faults(self, job_id: str) -> dict[int, str]:
        """Why shards were put back last."""
        return {int(k): v for k, v in cast(dict[str, str], self.client.hgetall(self._key(job_id, "faults"))).items()}

    def unknown(self, job_ids: Sequence[str]) -> list[str]:
        """Those of the jobs that are not in the ledger."""
        pipe = self.client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.exists(self._key(job_id, "job"))
        return [job_id for job_id, known in zip(job_ids, pipe.execute(), strict=True) if not known]

    def live_jobs(self) -> list[str]:
        """The jobs that have not ended, oldest first."""
        return cast(list[str], self.client.zrange("pm:live", 0, -1))

    def job_ids(self, limit: int | None) -> list[str]:
        """The newest jobs, or all, newest first."""
        return cast(list[str], self.client.zrange("pm:jobs", 0, -1 if limit is None else limit - 1, desc=True))

    def view(self, job_id: str) -> JobView:
        """The job as people see it. Raises UsageError if there is none of that id."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hgetall(self._key(job_id, "job"))
        pipe.hvals(self._key(job_id, "progress"))
        pipe.zcard(self._key(job_id, "leases"))
        fields, progress, leased = pipe.execute()
        if "spec" not in fields:
            raise _no_such_job(job_id)
        view = view_of(spec_of(fields), fields, sum(map(int, progress)), leased)
        return view if view.terminal else view.model_copy(update={"reason": self._reason(view, fields.get("stalled"))})

    def memory(self) -> Memory:
        """How much of its memory the server uses."""
        found = self.client.info("memory")
        return Memory(used=int(found["used_memory"]), limit=int(found.get("maxmemory", 0)))

    # --- workers ------------------------------------------------------------------------------------------------

    def announce(self, worker: WorkerView, ttl: float) -> None:
        """Say that a worker lives; it is forgotten `ttl` seconds after its last word."""
        pipe = self.client.pipeline()
        pipe.set(f"pm:worker:{worker.id}", worker.model_dump_json(), px=_ms(ttl))
        pipe.sadd("pm:workers", worker.id)
        pipe.execute()

    def withdraw(self, worker_id: str) -> None:
        self.client.delete(f"pm:worker:{worker_id}")
        self.client.srem("pm:workers", worker_id)

    def claim_sweep(self, ttl: float) -> bool:
        """Whether this caller is the first in `ttl` seconds."""
        return bool(self.client.set("pm:sweeping", _now(), px=_ms(ttl), nx=True))

    def announce_sweep(self, ttl: float) -> None:
        """Say that jobs are being driven on; it is forgotten `ttl` seconds after the last sweep."""
        self.client.set("pm:swept", _now(), px=_ms(ttl))

    def workers(self) -> list[WorkerView]:
        """The live workers, by id."""
        ids = sorted(cast(set[str], self.client.smembers("pm:workers")))
        if not ids:
            return []
        found = dict(zip(ids, cast(list[str | None], self.client.mget([f"pm:worker:{i}" for i in ids])), strict=True))
        if gone := [worker_id for worker_id, data in found.items() if data is None]:
            # A server that is a replica for a moment can be looked at all the same.
            with suppress(redis.ReadOnlyError):
                self.client.srem("pm:workers", *gone)
        return [WorkerView.model_validate_json(data) for data in found.values() if data is not None]

    def lock(self, job_id: str, what: str, ttl: float) -> Lock:
        """A lock that saves doing the same work twice; what it guards may be repeated, so two holders do no harm."""
        name = self._key(job_id, f"lock:{what}")
        return cast(Lock, self.client.lock(name, timeout=ttl, blocking=False, thread_local=False))

    # --- inside -------------------------------------------------------------------------------------------------

    def _key(self, job_id: str, name: str) -> str:
        return f"pm:{{{job_id}}}:{name}"

    def _keys(self, job_id: str, *names: str) -> list[str]:
        return [self._key(job_id, name) for name in names]

    def _run(self, name: str, keys: list[str], args: Sequence[Any]) -> Any:
        return self._scripts[name](keys=keys, args=args)

    def _finish(
        self, job_id: str, from_state: str, to_state: str, fields: dict[str, Any], ended_at: int | None = None
    ) -> str:
        keys = self._keys(job_id, "job", "ready", "leases", "own", "progress", "shards", "at")
        keys = [keys[0], "pm:live", "pm:deadlines", "pm:outputs", *keys[1:]]
        return cast(str, self._run("finish", keys, [job_id, from_state, to_state, ended_at or _now(), *_flat(fields)]))

    def _release(
        self, job_id: str, shard: int, attempt: str, fault: str, rest: float = 0, *, counts: bool = True
    ) -> bool:
        keys = self._keys(job_id, "ready", "leases", "own", "tries", "progress", "faults")
        args = [job_id, shard, attempt, fault, int(counts), _ms(rest)]
        return bool(self._run("release", keys, args))

    def _reason(self, view: JobView, stalled: str | None) -> str | None:
        """Why a job makes no progress, where that can be told."""
        if view.paused:
            running = f"{view.leased} shard(s) in work are finished" if view.leased else "nothing is in work"
            return f"paused: {running}, and no more is begun; `pagemill resume {view.id}` goes on"
        memory = self.memory()
        if memory.limit and memory.used >= memory.limit:
            # First: workers cannot even say that they live.
            return f"Redis is full, and takes nothing more. {_FREE}"
        undriven = None if self.client.exists("pm:swept") else _UNDRIVEN
        if view.state != "in_progress":
            return undriven or stalled
        serving = [worker for worker in self.workers() if worker.model == view.model]
        if not serving:
            return (
                f"no live worker serves the model {view.model!r}; start one with `pagemill worker --model {view.model}`"
            )
        faults = self.faults(view.id)
        if faults:
            shard, fault = next(iter(faults.items()))
            return f"shard {shard} is tried again: {fault}"
        if not view.leased:
            return undriven or f"waiting for a free slot of {len(serving)} worker(s)"
        return None


def _no_such_job(job_id: str) -> UsageError:
    return UsageError(f"There is no job {job_id!r}.", code="no_such_job", hint="`pagemill list` shows the jobs.")


def _flat(fields: dict[str, Any]) -> list[Any]:
    return [item for pair in fields.items() for item in pair]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _now() -> int:
    return int(time.time())
