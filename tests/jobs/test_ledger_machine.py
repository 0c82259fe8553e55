"""The ledger against a plain model of it: whatever happens in whatever order, and whatever is done twice."""

from dataclasses import dataclass, field
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
from jobs.ledger import Lease, Ledger
from jobs.records import TERMINAL, DeadShard, SegmentRecord, load_record
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
)
from tests.servers import ValkeyServer

MODEL = "tiny"
MAX_TRIES = 2
JOBS = st.integers(0, 2)
LOST = st.booleans()
WHICH = st.integers(0, 7)
"""The latest lease that was handed out, or one before it: most are over, which is the point."""
FAULT = RowError(code="x", message="y")
ENDING = {"finalizing": "completed", "cancelling": "cancelled"}
KEYS = ("ready", "leases", "own", "progress", "tries", "faults", "commit", "job")


@dataclass
class Job:
    """What the ledger should hold of one job."""

    spec: JobSpec
    size: int
    state: str | None = None
    fence: int = 0
    ready: set[int] = field(default_factory=set)
    owners: dict[int, Lease] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)
    progress: dict[int, int] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    records: dict[int, SegmentRecord | DeadShard] = field(default_factory=dict)

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
        return len(self.segments) + (ROWS * dead if self.state in ("completed", "cancelled") else 0)

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

    def stop(self, state: str) -> None:
        self.state = state
        self.ready.clear()
        self.owners.clear()
        self.overdue.clear()
        self.progress.clear()

    def lease(self) -> int | None:
        """The shard that the next attempt gets; shards tried too often are settled on the way."""
        while self.ready and self.state == "in_progress":
            shard = min(self.ready)
            self.ready.discard(shard)
            self.tries[shard] = self.tries.get(shard, 0) + 1
            if self.tries[shard] <= MAX_TRIES:
                self.fence += 1
                return shard
            self.settle(shard, DeadShard(dead=True, tries=MAX_TRIES, fault=self.faults.get(shard)))
        return None


class LedgerMachine(RuleBasedStateMachine):
    """Three jobs of one model, their planner, and workers that stall, stop, fail and come too late.

    Any command may lose its reply and be run again. What a second run answers is not what the first did, so then only
    the state is compared: it must be as if it had been run once.
    """

    server: ClassVar[ValkeyServer]

    @initialize(sizes=st.tuples(*[st.integers(1, 3)] * 3), open_jobs=st.integers(0, 3))
    def three_jobs(self, sizes: tuple[int, ...], open_jobs: int) -> None:
        self.client = LossyRedis.from_url(self.server.url, decode_responses=True)
        self.client.flushdb()
        self.ledger = Ledger(self.client)
        self.jobs = [
            Job(new_spec(id=f"job_{place}", model=MODEL, max_tries=MAX_TRIES, created_at=place), size)
            for place, size in enumerate(sizes)
        ]
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
            let_leases_run_out(self.client, job.spec.id)
            job.overdue = set(job.owners)
            self.sweep(place, False)
        while (lease := self.lease(False)) is not None:
            self.commit_lease(lease, False)
        for place, job in enumerate(self.jobs):
            self.finish(place, False)
            assert job.state in TERMINAL
            assert not self.client.exists(
                *(key(job.spec.id, name) for name in ("ready", "leases", "own", "progress", "shards"))
            )
        self.the_ledger_is_as_the_model_says()
        assert self.ledger.live_jobs() == []
        assert self.client.keys("pm:active:*") == []
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
        reply = self.run(lost, self.ledger.add_shards, job.spec.id, shards(job.size))
        if job.state == "validating":
            job.ready = set(range(job.size))
        assert reply == ("ok" if job.state == "validating" else job.state)

    def open(self, job: Job, lost: bool) -> None:
        reply = self.run(
            lost, self.ledger.open, job.spec, shards=job.size, rows=ROWS * job.size, errors=[], error_count=0
        )
        if job.state == "validating":
            job.state = "in_progress"
        assert reply == ("ok" if job.state == "in_progress" else job.state)

    # --- workers ------------------------------------------------------------------------------------------------

    @rule(lost=LOST)
    def take_a_shard(self, lost: bool) -> None:
        if (lease := self.lease(lost)) is not None:
            self.leases.append(lease)

    def lease(self, lost: bool) -> Lease | None:
        self.attempts += 1
        lease = self.run(lost, self.ledger.lease, MODEL, f"attempt-{self.attempts}", TTL)
        waiting = [job for job in self.jobs if job.state == "in_progress" and job.ready]
        for job in sorted(waiting, key=lambda job: len(job.owners)):
            if (shard := job.lease()) is not None:
                assert lease == Lease(job.spec, shards(job.size)[shard], f"attempt-{self.attempts}", job.fence)
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
        else:
            assert verdict == "lost"

    @precondition(lambda self: self.leases)
    @rule(which=WHICH, fault=st.sampled_from(["", "the disk is full"]), lost=LOST)
    def put_back(self, which: int, fault: str, lost: bool) -> None:
        lease = self.handed_out(which)
        job, shard = self.job_of(lease), lease.shard.index
        reply = (
            self.run(lost, self.ledger.release, lease, fault) if fault else self.run(lost, self.ledger.give_back, lease)
        )
        assert lost or reply == job.owns(lease)
        if job.owns(lease):
            job.put_back(shard)
            if fault:
                job.faults[shard] = fault
            else:
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
        assert (ready, running) == (len(job.ready), len(job.owners))

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
        open_yet = job.state in ("in_progress", "finalizing")
        assert lost or reply == open_yet
        if open_yet:
            del job.records[shard]
            job.tries.pop(shard)
            job.ready.add(shard)
            job.state = "in_progress"

    @precondition(lambda self: self.attempts > 3)
    @rule(number=JOBS, lost=LOST)
    def cancel(self, number: int, lost: bool) -> None:
        job = self.jobs[number]
        if job.state is None:
            return
        reply = self.run(lost, self.ledger.cancel, job.spec.id)
        if job.state in ("validating", "in_progress"):
            job.stop("cancelling")
        assert reply == ("ok" if job.state in ("cancelling", "cancelled") else job.state)

    @precondition(lambda self: any(job.state in ENDING for job in self.jobs))
    @rule(number=JOBS, lost=LOST)
    def finish(self, number: int, lost: bool) -> None:
        """An assembler ends the job as it should, after one that is late has tried from a state long gone."""
        job = self.jobs[number]
        for from_state, end in ENDING.items():
            dead = len(job.records) - len(job.segments)
            manifest = manifest_of(job.spec, end, ok=job.rows_done, failed=len(job.segments) + ROWS * dead)
            reply = self.run(lost, self.ledger.finish, manifest, from_state)
            if job.state == from_state:
                job.stop(end)
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
        assert reply == ("ok" if job.state == "failed" else job.state or "gone")

    # --- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        live = [job.spec.id for job in self.jobs if job.state and job.state not in TERMINAL]
        open_jobs = [job.spec.id for job in self.jobs if job.state == "in_progress"]
        pipe = self.client.pipeline(transaction=False)
        pipe.zrange("pm:live", 0, -1)
        pipe.zrange(f"pm:active:{model_key(MODEL)}", 0, -1)
        for job in self.jobs:
            for name in KEYS:
                if name in ("ready", "leases"):
                    pipe.zrange(key(job.spec.id, name), 0, -1, withscores=True)
                else:
                    pipe.hgetall(key(job.spec.id, name))
        found_live, found_open, *found = pipe.execute()
        assert sorted(found_live) == live
        assert found_open == open_jobs
        for place, job in enumerate(self.jobs):
            check(job, dict(zip(KEYS, found[place * len(KEYS) :], strict=False)))

    def run(self, lost: bool, act: Any, *args: Any, **fields: Any) -> Any:
        self.client.lossy = lost
        try:
            return act(*args, **fields)
        finally:
            self.client.lossy = False

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
    segments = job.segments
    assert len({record.fence for record in segments}) == len(segments)
    assert {name: int(found["job"][name]) for name in ("settled", "done", "failed", "fence")} == {
        "settled": len(job.records),
        "done": job.rows_done,
        "failed": job.rows_failed,
        "fence": job.fence,
    }


def numbers(found: dict[str, str]) -> dict[int, int]:
    return {int(name): int(value) for name, value in found.items()}


def test_any_order_of_events_and_repeats_leaves_what_the_model_says(valkey: ValkeyServer) -> None:
    LedgerMachine.server = valkey
    run_state_machine_as_test(LedgerMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))
