"""The ledger against a plain model of it: whatever happens in whatever order, and whatever is done twice."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobs.errors import RowError
from jobs.ledger import FairShare, Lease, Ledger
from jobs.records import TERMINAL, DeadShard, SegmentRecord, load_record
from jobs.shards import Shard
from jobs.spec import JobSpec, model_key
from tests.jobs.ledgers import (
    ROWS,
    TTL,
    LossyRedis,
    key,
    let_leases_run_out,
    manifest_of,
    new_spec,
    record_of,
    shards,
    worker,
)
from tests.servers import ValkeyServer

MODEL = "tiny"
QUEUE = f"pm:queue:{model_key(MODEL)}"
MAX_TRIES = 2
MAX_SHARDS = 8
WORKERS = ("a", "b", "c")
JOBS = st.integers(0, 2)
LOST = st.booleans()
WHICH = st.integers(0, 7)
"""The latest lease that was handed out, or one before it: most are over, which is the point."""
FAR_FUTURE = 2**40
FAULT = RowError(code="x", message="y")
SHARE = FairShare({"gold": 3}, patience=1e6)
KEYS = ("ready", "leases", "own", "progress", "tries", "faults", "commit", "job")


@dataclass
class Job:
    """What the ledger should hold of one job."""

    spec: JobSpec
    size: int
    in_runs: bool
    state: str | None = None
    paused: bool = False
    expiring: bool = False
    fence: int = 0
    ready: set[int] = field(default_factory=set)
    at: dict[str, int] = field(default_factory=dict)
    owners: dict[int, Lease] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)
    progress: dict[int, int] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    records: dict[int, SegmentRecord | DeadShard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.priority, self.weight = self.spec.priority, self.spec.weight

    @property
    def segments(self) -> list[SegmentRecord]:
        return [record for record in self.records.values() if isinstance(record, SegmentRecord)]

    @property
    def rows_done(self) -> int:
        return (ROWS - 1) * len(self.segments)

    @property
    def rows_failed(self) -> int:
        """A dead shard's rows are counted when the job ends."""
        dead = len(self.records) - len(self.segments)
        return len(self.segments) + (ROWS * dead if self.state in ("completed", "cancelled", "expired") else 0)

    @property
    def waits(self) -> bool:
        return self.state == "in_progress" and not self.paused and bool(self.ready)

    @property
    def ending(self) -> str | None:
        """How it is about to end."""
        if self.state == "finalizing":
            return "expired" if self.expiring else "completed"
        return "cancelled" if self.state == "cancelling" else None

    def owns(self, lease: Lease) -> bool:
        return self.owners.get(lease.shard.index) == lease

    def let_go(self, shard: int) -> None:
        del self.owners[shard]
        self.progress.pop(shard, None)
        self.overdue.discard(shard)

    def put_back(self, shard: int) -> None:
        self.let_go(shard)
        self.ready.add(shard)

    def settle(self, shard: int, record: SegmentRecord | DeadShard) -> None:
        self.records[shard] = record
        if len(self.records) == self.size:
            self.state = "finalizing"
            self.paused = False

    def stop(self, state: str) -> None:
        self.state = state
        self.paused = False
        self.ready.clear()
        self.owners.clear()
        self.overdue.clear()
        self.progress.clear()

    def lease(self, worker: str, present: set[str]) -> int | None:
        """The shard that the next attempt gets; shards tried too often are settled on the way."""
        while self.ready and self.state == "in_progress":
            shard = self.next_in_line(worker, present)
            self.ready.discard(shard)
            self.tries[shard] = self.tries.get(shard, 0) + 1
            if self.tries[shard] <= MAX_TRIES:
                self.fence += 1
                if worker:
                    self.at[worker] = place_of(shard)
                return shard
            self.settle(shard, DeadShard(dead=True, tries=MAX_TRIES, fault=self.faults.get(shard)))
        return None

    def next_in_line(self, worker: str, present: set[str]) -> int:
        line = sorted(self.ready, key=place_of)
        if not (worker and self.in_runs):
            return line[0]
        if worker in self.at:
            begins = self.at[worker]
            ends = min((place for name, place in self.at.items() if name != worker and place > begins), default=99)
            if run := [shard for shard in line if begins <= place_of(shard) < ends]:
                return run[0]
        self.at = {name: place for name, place in self.at.items() if name in (worker, *present)}
        bounds = [-1, *sorted(place for name, place in self.at.items() if name != worker), 99]
        nobodys, *runs = [[s for s in line if first <= place_of(s) < last] for first, last in pairwise(bounds)]
        if nobodys:
            return nobodys[0]
        longest = max(runs, key=len)
        return longest[len(longest) // 2]


@dataclass
class Level:
    """Whose turn it is within one priority: virtual times of tenants, and of the jobs of each."""

    tenants: dict[str, float] = field(default_factory=dict)
    jobs: dict[str, dict[str, float]] = field(default_factory=dict)
    past: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)

    def refresh(self, job: Job) -> None:
        """The job has work to hand out, or has not, since something happened to it."""
        spec = job.spec
        jobs = self.jobs.setdefault(spec.tenant, {})
        if job.waits and spec.id not in jobs:
            jobs[spec.id] = max(self.past.get(spec.id, 0), self.clocks.get(spec.tenant, 0))
            start = max(self.past.get(f"/{spec.tenant}", 0), self.clocks.get("", 0))
            self.tenants.setdefault(spec.tenant, start)
        elif not job.waits and spec.id in jobs:
            self.leave(spec)
        if job.state != "in_progress":
            self.past.pop(spec.id, None)

    def leave(self, spec: JobSpec) -> None:
        jobs = self.jobs[spec.tenant]
        self.past[spec.id] = jobs.pop(spec.id)
        if not jobs:
            self.past[f"/{spec.tenant}"] = self.tenants.pop(spec.tenant)
        if not self.tenants:
            self.past.clear()
            self.clocks.clear()

    def forget(self, spec: JobSpec) -> None:
        """The job goes to another level."""
        if spec.id in self.jobs.get(spec.tenant, {}):
            self.leave(spec)
        self.past.pop(spec.id, None)

    def next_job(self) -> str:
        """Ids sort by age here."""
        least = min(self.tenants.values())
        tied = [tenant for tenant, time in self.tenants.items() if time == least]
        return min(min(self.jobs[t], key=lambda job_id: (self.jobs[t][job_id], job_id)) for t in tied)

    def charge(self, job: Job) -> None:
        spec, jobs = job.spec, self.jobs[job.spec.tenant]
        self.clocks |= {"": self.tenants[spec.tenant], spec.tenant: jobs[spec.id]}
        self.tenants[spec.tenant] += 1 / SHARE.weights.get(spec.tenant, 1)
        jobs[spec.id] += 1 / job.weight


class LedgerMachine(RuleBasedStateMachine):
    """Three jobs of one model, their planner, and workers that stall, stop, fail and come too late.

    Any command may lose its reply and be run again. What a second run answers is not what the first did, so then only
    the state is compared: it must be as if it had been run once.
    """

    server: ClassVar[ValkeyServer]

    @initialize(
        sizes=st.tuples(*[st.integers(1, MAX_SHARDS)] * 3),
        runs=st.tuples(*[st.booleans()] * 3),
        owners=st.tuples(*[st.sampled_from([("gold", 0), ("base", 0), ("base", 5)])] * 3),
        weights=st.tuples(*[st.sampled_from([1, 2])] * 3),
        open_jobs=st.integers(0, 3),
    )
    def three_jobs(
        self,
        sizes: tuple[int, ...],
        runs: tuple[bool, ...],
        owners: tuple[tuple[str, int], ...],
        weights: tuple[int, ...],
        open_jobs: int,
    ) -> None:
        self.client = LossyRedis.from_url(self.server.url, decode_responses=True)
        self.client.flushdb()
        self.ledger = Ledger(self.client)
        self.levels = {0: Level(), 5: Level()}
        self.jobs = []
        for place, size in enumerate(sizes):
            tenant, priority = owners[place]
            fields = {"tenant": tenant, "priority": priority, "weight": weights[place], "expires_at": FAR_FUTURE}
            spec = new_spec(id=f"job_{place}", model=MODEL, max_tries=MAX_TRIES, created_at=place, **fields)
            self.jobs.append(Job(spec, size, runs[place]))
        self.present: set[str] = set()
        for name in WORKERS:
            self.come_or_go(name)
        self.attempts = 0
        self.leases: list[Lease] = []
        for place in range(open_jobs):
            self.plan(place, False)

    def teardown(self) -> None:
        """Whatever happened before, all jobs can be brought to their end, and then hold nothing."""
        if not hasattr(self, "jobs"):
            return
        for place, job in enumerate(self.jobs):
            self.plan(place, False)
            self.resume(place, False)
            let_leases_run_out(self.client, job.spec.id)
            job.overdue = set(job.owners)
            self.sweep(place, False)
        while (lease := self.lease("a", False)) is not None:
            self.commit_lease(lease, False)
        for place, job in enumerate(self.jobs):
            self.finish(place, False)
            assert job.state in TERMINAL
            assert not self.client.exists(
                *(key(job.spec.id, name) for name in ("ready", "leases", "own", "progress", "shards", "at"))
            )
        self.the_ledger_is_as_the_model_says()
        assert self.ledger.live_jobs() == []
        assert self.client.keys("pm:queue:*") == []
        assert not self.client.exists("pm:deadlines", "pm:outputs")
        self.client.close()

    # --- the planner --------------------------------------------------------------------------------------------

    @rule(number=JOBS, lost=LOST, steps=st.integers(1, 3))
    def plan(self, number: int, lost: bool, steps: int = 3) -> None:
        """As far as the planner comes this time; it begins at the beginning each time."""
        for step in (self.create, self.enter_shards, self.open)[:steps]:
            step(self.jobs[number], lost)

    def create(self, job: Job, lost: bool) -> None:
        created = self.run(lost, self.ledger.create, job.spec)
        assert lost or created == (job.state is None)
        job.state = job.state or "validating"

    def enter_shards(self, job: Job, lost: bool) -> None:
        reply = self.run(lost, self.ledger.add_shards, job.spec.id, shards_of(job))
        if job.state == "validating":
            job.ready = set(range(job.size))
        assert reply == ("ok" if job.state == "validating" else job.state)

    def open(self, job: Job, lost: bool) -> None:
        reply = self.run(
            lost,
            self.ledger.open,
            job.spec,
            shards=job.size,
            rows=ROWS * job.size,
            errors=[],
            error_count=0,
            in_runs=job.in_runs,
        )
        if job.state == "validating":
            job.state = "in_progress"
            self.refresh(job)
        assert reply == ("ok" if job.state == "in_progress" else job.state)

    # --- workers ------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(WORKERS))
    def come_or_go(self, name: str) -> None:
        if name in self.present:
            self.ledger.withdraw(name)
        else:
            self.ledger.announce(worker(MODEL, id=name), TTL)
        self.present ^= {name}

    @rule(name=st.sampled_from(["", *WORKERS]), lost=LOST)
    def take_a_shard(self, name: str, lost: bool) -> None:
        """One that is thought to be gone may take one too: its word was late."""
        if (lease := self.lease(name, lost)) is not None:
            self.leases.append(lease)

    def lease(self, worker: str, lost: bool) -> Lease | None:
        self.attempts += 1
        lease = self.run(lost, self.ledger.lease, MODEL, f"attempt-{self.attempts}", TTL, SHARE, worker=worker)
        while any(job.waits for job in self.jobs):
            level = self.levels[max(job.priority for job in self.jobs if job.waits)]
            job = next(job for job in self.jobs if job.spec.id == level.next_job())
            shard = job.lease(worker, self.present)
            if shard is not None:
                level.charge(job)
            self.refresh(job)
            if shard is not None:
                attempt = f"attempt-{self.attempts}"
                assert lease == Lease(job.spec, shards_of(job)[shard], attempt, job.fence, job.tries[shard])
                job.owners[shard] = lease
                return lease
        assert lease is None
        return None

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, rows=st.integers(0, ROWS))
    def beat(self, which: int, rows: int) -> None:
        lease = self.handed_out(which)
        job = self.job_of(lease)
        (verdict,) = self.ledger.beat([(lease, rows)], TTL)
        if job.state != "in_progress":
            assert verdict == "stop"
        elif job.owns(lease):
            assert verdict == "ok"
            job.overdue.discard(lease.shard.index)
            job.progress[lease.shard.index] = rows
        else:
            assert verdict == "lost"

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, lost=LOST)
    def commit(self, which: int, lost: bool) -> None:
        """Also of an attempt that is long over: it must change nothing."""
        self.commit_lease(self.handed_out(which), lost)

    def commit_lease(self, lease: Lease, lost: bool) -> None:
        job, shard = self.job_of(lease), lease.shard.index
        present = job.records.get(shard)
        verdict = self.run(lost, self.ledger.commit, lease, record_of(lease))
        if present is not None:
            mine = isinstance(present, SegmentRecord) and present.attempt == lease.attempt
            assert verdict == ("ok" if mine else "superseded")
        elif job.state != "in_progress":
            assert verdict == "stop"
        elif job.owns(lease):
            assert verdict == "ok"
            job.let_go(shard)
            job.settle(shard, record_of(lease))
            job.faults.pop(shard, None)
            self.refresh(job)
        else:
            assert verdict == "lost"

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, counts=st.booleans(), fault=st.sampled_from(["", "the disk is full"]), lost=LOST)
    def put_back(self, which: int, counts: bool, fault: str, lost: bool) -> None:
        lease = self.handed_out(which)
        job, shard = self.job_of(lease), lease.shard.index
        reply = self.run(lost, self.ledger.release if counts else self.ledger.give_back, lease, fault)
        assert lost or reply == job.owns(lease)
        if job.owns(lease):
            job.put_back(shard)
            self.refresh(job)
            if fault or counts:
                job.faults[shard] = fault or "unknown fault"
            if not counts:
                job.tries[shard] -= 1

    # --- time, storage, people ----------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(which=WHICH)
    def a_lease_runs_out(self, which: int) -> None:
        lease = self.handed_out(which)
        if self.job_of(lease).owns(lease):
            let_leases_run_out(self.client, lease.job_id, [lease.shard.index])
            self.job_of(lease).overdue.add(lease.shard.index)

    @rule(number=JOBS, lost=LOST)
    def sweep(self, number: int, lost: bool) -> None:
        job = self.jobs[number]
        expired, ready, running = self.run(lost, self.ledger.expire, job.spec.id)
        assert lost or expired == len(job.overdue)
        for shard in list(job.overdue):
            job.put_back(shard)
        self.refresh(job)
        assert (ready, running) == (0 if job.paused else len(job.ready), len(job.owners))

    @precondition(lambda self: any(job.records for job in self.jobs))
    @rule(number=JOBS, lost=LOST, data=st.data())
    def a_segment_vanishes(self, number: int, lost: bool, data: st.DataObject) -> None:
        job = self.jobs[number]
        committed = {shard: record for shard, record in job.records.items() if isinstance(record, SegmentRecord)}
        if not committed:
            return
        shard = data.draw(st.sampled_from(sorted(committed)))
        another = committed[shard].model_copy(update={"attempt": "another"})
        assert not self.ledger.reopen(job.spec, shard, another)
        reply = self.run(lost, self.ledger.reopen, job.spec, shard, committed[shard])
        open_yet = job.state in ("in_progress", "finalizing") and not job.expiring
        assert lost or reply == open_yet
        if open_yet:
            del job.records[shard]
            job.tries.pop(shard)
            job.ready.add(shard)
            job.state = "in_progress"
            self.refresh(job)

    @precondition(lambda self: self.attempts > 3)
    @rule(number=JOBS, lost=LOST)
    def cancel(self, number: int, lost: bool) -> None:
        job = self.jobs[number]
        if job.state is None:
            return
        reply = self.run(lost, self.ledger.cancel, job.spec.id)
        if job.state in ("validating", "in_progress"):
            job.stop("cancelling")
            self.refresh(job)
        assert reply == ("ok" if job.state in ("cancelling", "cancelled") else job.state)

    @rule(number=JOBS, lost=LOST)
    def pause(self, number: int, lost: bool) -> None:
        self.set_paused(self.jobs[number], self.run(lost, self.ledger.pause, self.jobs[number].spec.id), True)

    @rule(number=JOBS, lost=LOST)
    def resume(self, number: int, lost: bool) -> None:
        self.set_paused(self.jobs[number], self.run(lost, self.ledger.resume, self.jobs[number].spec.id), False)

    def set_paused(self, job: Job, reply: str, paused: bool) -> None:
        can_be = job.state in ("validating", "in_progress")
        assert reply == ("ok" if can_be else job.state or "gone")
        if can_be:
            job.paused = paused
            self.refresh(job)

    @rule(number=JOBS, lost=LOST, priority=st.sampled_from([None, 0, 5]), weight=st.sampled_from([None, 1.0, 2.0]))
    def set_terms(self, number: int, lost: bool, priority: int | None, weight: float | None) -> None:
        job = self.jobs[number]
        reply = self.run(lost, self.ledger.set_terms, job.spec.id, priority=priority, weight=weight)
        can_be = job.state in ("validating", "in_progress")
        assert reply == ("ok" if can_be else job.state or "gone")
        if not can_be:
            return
        if priority is not None and priority != job.priority:
            self.levels[job.priority].forget(job.spec)
            job.priority = priority
            self.refresh(job)
        job.weight = weight or job.weight

    @precondition(lambda self: self.attempts > 3)
    @rule(number=JOBS, lost=LOST)
    def the_deadline_passes(self, number: int, lost: bool) -> None:
        job = self.jobs[number]
        if job.state is None:
            return
        if job.state in ("validating", "in_progress"):
            assert self.run(lost, self.ledger.expire_job, job.spec.id) == "early"
            self.client.hset(key(job.spec.id, "job"), "expires_at", 1)
        reply = self.run(lost, self.ledger.expire_job, job.spec.id)
        if job.state in ("validating", "in_progress"):
            job.stop("finalizing")
            job.expiring = True
            self.refresh(job)
        assert reply == ("ok" if job.expiring else job.state)

    @precondition(lambda self: any(job.ending for job in self.jobs))
    @rule(number=JOBS, lost=LOST)
    def finish(self, number: int, lost: bool) -> None:
        """An assembler ends the job as it should, after one that is late has tried from a state long gone."""
        job = self.jobs[number]
        assert self.ledger.ending(job.spec.id) == job.ending
        for from_state, end in (
            ("finalizing", "expired" if job.expiring else "completed"),
            ("cancelling", "cancelled"),
        ):
            dead = len(job.records) - len(job.segments)
            manifest = manifest_of(job.spec, end, ok=job.rows_done, failed=len(job.segments) + ROWS * dead)
            reply = self.run(lost, self.ledger.finish, manifest, from_state)
            if job.state == from_state:
                job.stop(end)
                self.refresh(job)
            assert reply == ("ok" if job.state == end else job.state or "gone")

    @precondition(lambda self: self.attempts > 3)
    @rule(number=JOBS, lost=LOST, from_state=st.sampled_from(["validating", "in_progress"]))
    def fail(self, number: int, lost: bool, from_state: str) -> None:
        job = self.jobs[number]
        reply = self.run(
            lost, self.ledger.fail, job.spec.id, [FAULT], error_count=1, error_url=None, from_state=from_state
        )
        if job.state == from_state:
            job.stop("failed")
            self.refresh(job)
        assert reply == ("ok" if job.state == "failed" else job.state or "gone")

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        live = [job.spec.id for job in self.jobs if job.state and job.state not in TERMINAL]
        pipe = self.client.pipeline(transaction=False)
        pipe.zrange("pm:live", 0, -1)
        pipe.zrange(QUEUE, 0, -1, withscores=True)
        for job in self.jobs:
            for name in KEYS:
                if name in ("ready", "leases"):
                    pipe.zrange(key(job.spec.id, name), 0, -1, withscores=True)
                else:
                    pipe.hgetall(key(job.spec.id, name))
        found_live, found_levels, *found = pipe.execute()
        assert sorted(found_live) == live
        assert found_levels == [(str(p), -p) for p, level in sorted(self.levels.items(), reverse=True) if level.tenants]
        for place, job in enumerate(self.jobs):
            check(job, dict(zip(KEYS, found[place * len(KEYS) :], strict=False)))

    @invariant()
    def the_queue_is_as_the_model_says(self) -> None:
        for priority, level in self.levels.items():
            assert dict(self.client.zrange(f"{QUEUE}:{priority}", 0, -1, withscores=True)) == level.tenants
            for tenant in ("gold", "base"):
                found = self.client.zrange(f"{QUEUE}:{priority}/{tenant}", 0, -1, withscores=True)
                assert {place.partition(":")[2]: time for place, time in found} == level.jobs.get(tenant, {})

    def run(self, lost: bool, act: Any, *args: Any, **fields: Any) -> Any:
        self.client.lossy = lost
        try:
            return act(*args, **fields)
        finally:
            self.client.lossy = False

    def refresh(self, job: Job) -> None:
        self.levels[job.priority].refresh(job)

    def handed_out(self, which: int) -> Lease:
        return self.leases[-1 - which % len(self.leases)]

    def job_of(self, lease: Lease) -> Job:
        return next(job for job in self.jobs if job.spec == lease.spec)


def check(job: Job, found: dict[str, Any]) -> None:
    """What the job's keys hold is what the model holds of it."""
    own: dict[str, str] = {}
    for shard, lease in job.owners.items():
        own |= {f"s:{shard}": lease.attempt, f"a:{lease.attempt}": str(shard), f"f:{shard}": str(lease.fence)}
    assert found["job"].get("state") == job.state
    assert ("paused" in found["job"]) == job.paused
    assert {int(shard) for shard, _ in found["ready"]} == job.ready
    assert {int(shard) for shard, _ in found["leases"]} == set(job.owners)
    assert {int(shard) for shard, expiry in found["leases"] if expiry == 1} == job.overdue
    assert found["own"] == own
    assert numbers(found["progress"]) == job.progress
    assert numbers(found["tries"]) == job.tries
    assert found["faults"] == {str(shard): fault for shard, fault in job.faults.items()}
    assert {int(shard): load_record(data) for shard, data in found["commit"].items()} == job.records
    if job.state is None:
        return
    assert (int(found["job"]["priority"]), float(found["job"]["weight"])) == (job.priority, job.weight)
    segments = job.segments
    assert len({record.fence for record in segments}) == len(segments)
    assert {name: int(found["job"][name]) for name in ("settled", "done", "failed", "fence")} == {
        "settled": len(job.records),
        "done": job.rows_done,
        "failed": job.rows_failed,
        "fence": job.fence,
    }


def place_of(shard: int) -> int:
    """The last of the file is the first in line."""
    return MAX_SHARDS - shard


def shards_of(job: Job) -> list[Shard]:
    return [replace(shard, place=place_of(shard.index)) for shard in shards(job.size)]


def numbers(found: dict[str, str]) -> dict[int, int]:
    return {int(name): int(value) for name, value in found.items()}


def test_any_order_of_events_and_repeats_leaves_what_the_model_says(valkey: ValkeyServer) -> None:
    LedgerMachine.server = valkey
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))
