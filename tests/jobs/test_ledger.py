"""The ledger on a real Valkey, against a plain model: whatever order things happen in, and whatever is repeated."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobs.errors import RowError, UsageError
from jobs.ledger import Lease, Ledger
from jobs.records import DeadShard, Manifest, ResultFile, SegmentRecord, Usage, WorkerView
from jobs.shards import Shard
from jobs.spec import JobSpec
from tests.jobs.specs import record_spec
from tests.servers import ValkeyServer

T = TypeVar("T")

TTL = 60.0
MAX_TRIES = 3
IDS = count()


def new_spec(**fields: object) -> JobSpec:
    return record_spec(id=f"job_{next(IDS)}", max_tries=MAX_TRIES, model=f"model {next(IDS)}", **fields)


def shards(number: int) -> list[Shard]:
    return [
        Shard(index=i, first_row=10 * i, rows=10, start=100 * i, end=100 * i + 100, first_line=1) for i in range(number)
    ]


def record_of(lease: Lease, **fields: object) -> SegmentRecord:
    return SegmentRecord(**{"attempt": lease.attempt, "fence": lease.fence, "ok": 9, "failed": 1, **fields})


def opened(ledger: Ledger, number: int, spec: JobSpec | None = None) -> JobSpec:
    spec = spec or new_spec()
    assert ledger.create(spec)
    assert ledger.add_shards(spec.id, shards(number)) == "ok"
    assert ledger.open(spec, shards=number, rows=10 * number, errors=[], error_count=0) == "ok"
    return spec


def let_lease_run_out(ledger: Ledger, job_id: str, shard: int) -> None:
    ledger.client.zadd(f"pm:{{{job_id}}}:leases", {str(shard): 1})


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    return Ledger(valkey.client)


@dataclass
class Model:
    """What the ledger should hold of one job."""

    spec: JobSpec
    state: str = "in_progress"
    ready: set[int] = field(default_factory=set)
    owners: dict[int, Lease] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    records: dict[int, SegmentRecord | DeadShard] = field(default_factory=dict)
    last_fence: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """Workers that lease, beat, commit, stop, stall and repeat themselves, on one job with a few shards."""

    valkey: ValkeyServer
    leases = Bundle("leases")

    @initialize(number=st.integers(1, 4))
    def submit(self, number: int) -> None:
        self.ledger = Ledger(self.valkey.client)
        self.spec = opened(self.ledger, number)
        self.number = number
        self.model = Model(self.spec, ready=set(range(number)))
        self.attempts = count()

    @rule(target=leases)
    def lease(self) -> Lease | None:
        attempt = f"{self.spec.id}-{next(self.attempts)}"
        lease = self.ledger.lease(self.spec.model, attempt, TTL)
        model = self.model
        while model.state == "in_progress" and model.ready:
            shard = min(model.ready)
            model.ready.discard(shard)
            model.tries[shard] = model.tries.get(shard, 0) + 1
            if model.tries[shard] <= MAX_TRIES:
                assert lease is not None
                assert (lease.shard.index, lease.shard) == (shard, shards(self.number)[shard])
                assert lease.fence > model.last_fence
                model.last_fence = lease.fence
                model.owners[shard] = lease
                return lease
            self._settle(shard, DeadShard(dead=True, tries=MAX_TRIES))
        assert lease is None
        return None

    @rule(lease=leases)
    def the_reply_of_a_lease_is_lost(self, lease: Lease | None) -> None:
        if lease is None or not self._owns(lease):
            return
        again = self.ledger.lease(self.spec.model, lease.attempt, TTL) if self.model.ready else lease
        assert again == lease

    @rule(lease=leases, rows=st.integers(0, 10))
    def beat(self, lease: Lease | None, rows: int) -> None:
        if lease is not None:
            (verdict,) = self.ledger.beat([(lease, rows)], TTL)
            expected = "ok" if self._owns(lease) else "lost"
            assert verdict == ("stop" if self.model.state != "in_progress" else expected)

    @rule(lease=leases)
    def commit(self, lease: Lease | None) -> None:
        if lease is None:
            return
        shard = lease.shard.index
        present = self.model.records.get(shard)
        verdict = self.ledger.commit(lease, record_of(lease))
        if present is not None:
            mine = isinstance(present, SegmentRecord) and present.attempt == lease.attempt
            assert verdict == ("ok" if mine else "superseded")
        elif self.model.state != "in_progress":
            assert verdict == "stop"
        elif self._owns(lease):
            assert verdict == "ok"
            self._settle(shard, record_of(lease))
        else:
            assert verdict == "lost"

    @rule(lease=leases, fault=st.sampled_from(["", "the disk is full"]))
    def put_back(self, lease: Lease | None, fault: str) -> None:
        if lease is None:
            return
        owned = self._owns(lease)
        assert (self.ledger.release(lease, fault) if fault else self.ledger.give_back(lease)) == owned
        if owned:
            shard = lease.shard.index
            del self.model.owners[shard]
            self.model.ready.add(shard)
            self.model.tries[shard] -= not fault

    @precondition(lambda self: self.model.owners)
    @rule(data=st.data())
    def a_lease_runs_out(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(self.model.owners)))
        let_lease_run_out(self.ledger, self.spec.id, shard)
        expired, _, _ = self.ledger.expire(self.spec.id)
        assert expired == 1
        del self.model.owners[shard]
        self.model.ready.add(shard)

    @precondition(lambda self: self.model.state in ("in_progress", "finalizing"))
    @rule(data=st.data())
    def a_segment_vanishes(self, data: st.DataObject) -> None:
        committed = [s for s, r in self.model.records.items() if isinstance(r, SegmentRecord)]
        if not committed:
            return
        shard = data.draw(st.sampled_from(sorted(committed)))
        record = self.model.records[shard]
        assert isinstance(record, SegmentRecord)
        assert not self.ledger.reopen(self.spec, shard, record.model_copy(update={"attempt": "another"}))
        assert self.ledger.reopen(self.spec, shard, record)
        del self.model.records[shard]
        self.model.tries.pop(shard)
        self.model.ready.add(shard)
        self.model.state = "in_progress"

    @rule()
    def the_planner_wakes_up_late(self) -> None:
        assert self.ledger.add_shards(self.spec.id, shards(self.number)) == self.model.state

    @precondition(lambda self: len(self.model.records) >= 2)
    @rule()
    def cancel(self) -> None:
        reply = self.ledger.cancel(self.spec.id)
        if self.model.state in ("in_progress", "cancelling"):
            assert reply == "ok"
            self.model.state = "cancelling"
            self.model.ready.clear()
            self.model.owners.clear()
        else:
            assert reply == self.model.state

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        model, view = self.model, self.ledger.view(self.spec.id)
        records = self.ledger.records(self.spec.id)
        assert records == model.records
        assert view.state == model.state
        assert view.settled == len(records)
        assert view.leased == len(model.owners)
        segments = [r for r in records.values() if isinstance(r, SegmentRecord)]
        assert (view.done, view.failed) == (9 * len(segments), len(segments))
        assert len({r.fence for r in segments}) == len(segments)
        client, key = self.ledger.client, f"pm:{{{self.spec.id}}}:"
        assert {int(s) for s in client.zrange(key + "ready", 0, -1)} == model.ready
        owners = {int(k[2:]): v for k, v in client.hgetall(key + "own").items() if k.startswith("s:")}
        assert owners == {shard: lease.attempt for shard, lease in model.owners.items()}
        assert client.hlen(key + "own") == 3 * len(owners)

    def _owns(self, lease: Lease) -> bool:
        return self.model.owners.get(lease.shard.index) == lease

    def _settle(self, shard: int, record: SegmentRecord | DeadShard) -> None:
        self.model.records[shard] = record
        self.model.owners.pop(shard, None)
        if len(self.model.records) == self.number:
            self.model.state = "finalizing"


def test_any_order_of_events_leaves_one_record_a_shard(valkey: ValkeyServer) -> None:
    class Machine(LedgerMachine):
        pass

    Machine.valkey = valkey
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


class Crash(Exception):
    """A worker that is no more."""


@dataclass
class Worker:
    """Works on shards as a slot does, and crashes, stalls and repeats itself at every step."""

    ledger: Ledger
    spec: JobSpec
    store: dict[str, str]
    lock: threading.Lock
    random: random.Random
    ttl: float

    def run(self) -> None:
        while self.ledger.state(self.spec.id) == "in_progress":
            with suppress(Crash):
                self.work()

    def work(self) -> None:
        attempt = f"{self.random.getrandbits(128):032x}"
        lease = self.twice(lambda: self.ledger.lease(self.spec.model, attempt, self.ttl))
        if lease is None:
            threading.Event().wait(0.02)
            return
        self.trouble()
        if self.twice(lambda: self.ledger.beat([(lease, 1)], self.ttl)) != ["ok"]:
            return
        if self.random.random() < 0.05:
            self.ledger.give_back(lease)
            return
        self.trouble()
        url = self.spec.layout.segment(lease.shard.index, lease.fence, lease.attempt)
        with self.lock:
            assert url not in self.store, "the key of an attempt was used again"
            self.store[url] = lease.attempt
        self.trouble()
        self.twice(lambda: self.ledger.commit(lease, record_of(lease)))
        self.trouble()

    def trouble(self) -> None:
        dice = self.random.random()
        if dice < 0.06:
            raise Crash
        if dice < 0.1:
            threading.Event().wait(1.5 * self.ttl)  # a pause longer than the lease

    def twice(self, call: Callable[[], T]) -> T:
        reply = call()
        return call() if self.random.random() < 0.1 else reply


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_crash_stall_and_repeat_commit_each_shard_once(seed: int, valkey: ValkeyServer) -> None:
    ledger = Ledger(valkey.client)
    number = 60
    spec = opened(ledger, number, new_spec().model_copy(update={"max_tries": 100}))
    store: dict[str, str] = {}
    lock = threading.Lock()
    workers = [
        Worker(Ledger(valkey.client), spec, store, lock, random.Random(f"{seed}-{n}"), ttl=0.2) for n in range(8)
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while ledger.state(spec.id) == "in_progress" and time.monotonic() < deadline:
        ledger.expire(spec.id)
        threading.Event().wait(0.05)
    for thread in threads:
        thread.join(10)
    assert ledger.state(spec.id) == "finalizing"
    records = ledger.records(spec.id)
    assert sorted(records) == list(range(number))
    for shard, record in records.items():
        assert isinstance(record, SegmentRecord)
        assert store[spec.layout.segment(shard, record.fence, record.attempt)] == record.attempt
    view = ledger.view(spec.id)
    assert (view.settled, view.done, view.leased, view.in_flight) == (number, 9 * number, 0, 0)
    assert ledger.client.hlen(f"pm:{{{spec.id}}}:own") == 0


def manifest_of(spec: JobSpec, state: str = "completed") -> Manifest:
    return Manifest(
        job_id=spec.id,
        spec_fingerprint=spec.fingerprint,
        state=state,
        rows=10,
        ok=9,
        failed=1,
        usage=Usage(),
        output=ResultFile(url="file:///out.jsonl", size=1, lines=9),
        errors=None,
        remaining=None,
        engines=(),
        segments=(),
    )


def test_a_job_is_created_once(ledger: Ledger) -> None:
    spec = new_spec()
    assert ledger.create(spec)
    assert not ledger.create(spec)
    assert ledger.job_ids(10) == ledger.live_jobs() == [spec.id]
    assert ledger.spec(spec.id) == spec


def test_a_finished_job_leaves_its_history_and_nothing_else(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    lease = ledger.lease(spec.model, "attempt", TTL)
    assert lease is not None
    ledger.commit(lease, record_of(lease))
    assert ledger.finish(manifest_of(spec), from_state="finalizing") == "ok"
    assert ledger.finish(manifest_of(spec), from_state="finalizing") == "ok"
    assert ledger.live_jobs() == []
    left = {key.rpartition(":")[2] for key in ledger.client.keys(f"pm:{{{spec.id}}}:*")}
    assert left == {"job", "commit", "tries"}
    view = ledger.view(spec.id)
    assert (view.state, view.terminal, view.reason) == ("completed", True, None)


def test_a_job_that_ended_is_not_cancelled(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    assert ledger.fail(
        spec.id, [RowError(code="x", message="y")], error_count=1, error_url=None, from_state="in_progress"
    )
    assert ledger.cancel(spec.id) == "failed"
    assert ledger.lease(spec.model, "attempt", TTL) is None


def test_the_job_with_the_fewest_shards_in_work_comes_first(ledger: Ledger) -> None:
    large = opened(ledger, 5)
    small = opened(ledger, 2, new_spec().model_copy(update={"model": large.model}))
    order = [ledger.lease(large.model, f"attempt-{n}", TTL) for n in range(5)]
    assert [lease.job_id for lease in order if lease] == [large.id, small.id, large.id, small.id, large.id]


def test_a_job_without_a_worker_says_so(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    assert "no live worker serves" in (ledger.view(spec.id).reason or "")
    worker = WorkerView(id="w", model=spec.model, slots=2, busy=0, host="h", pid=1, engine="e")
    ledger.announce(worker, TTL)
    assert ledger.workers() == [worker]
    assert "waiting for a free slot" in (ledger.view(spec.id).reason or "")
    ledger.withdraw("w")
    assert ledger.workers() == []


def test_a_shard_that_was_put_back_says_why(ledger: Ledger) -> None:
    spec = opened(ledger, 1)
    ledger.announce(WorkerView(id="w", model=spec.model, slots=2, busy=0, host="h", pid=1, engine="e"), TTL)
    lease = ledger.lease(spec.model, "attempt", TTL)
    assert lease is not None
    ledger.release(lease, "the bucket refuses")
    assert "the bucket refuses" in (ledger.view(spec.id).reason or "")


def test_an_unknown_job_is_an_error(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="no job 'nothing'"):
        ledger.view("nothing")
