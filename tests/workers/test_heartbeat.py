"""The heartbeat: leases live while their slots do, and a slot hears at once that its lease is over."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.ledger import Ledger, Verdict
from tests.jobs.ledgers import key, leased, new_spec, opened, worker
from tests.servers import ValkeyServer
from workers.heartbeat import Heartbeat, Held

TTL = 0.3
WAIT_S = 20


class Ending:
    """Hears how a lease ended."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self._heard = threading.Event()

    def __call__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self._heard.set()

    def wait(self) -> Verdict | None:
        assert self._heard.wait(WAIT_S)
        return self.verdict


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    return Ledger(valkey.client)


@pytest.fixture
def heartbeat(ledger: Ledger) -> Iterator[Heartbeat]:
    heartbeat = Heartbeat(ledger, TTL, lambda busy: worker("tiny", busy=busy))
    heartbeat.start()
    yield heartbeat
    heartbeat.stop()


def wait_for_beats(ledger: Ledger, beats: int = 3) -> None:
    """Until the worker has spoken so often: each beat sets its key's expiry anew."""
    idle = threading.Event()
    for _ in range(beats):
        before = ledger.client.pexpiretime("pm:worker:w")
        while ledger.client.pexpiretime("pm:worker:w") == before:
            idle.wait(0.01)


def test_a_held_lease_outlives_its_ttl(ledger: Ledger, heartbeat: Heartbeat) -> None:
    spec = opened(ledger, 2)
    held, dropped = leased(ledger, spec, "held"), leased(ledger, spec, "dropped")
    ending = Ending()
    for lease in (held, dropped):
        ledger.client.zadd(key(spec.id, "leases"), {str(lease.shard.index): 1})
        heartbeat.hold(Held(lease, lambda: 4, ending))
    heartbeat.drop(dropped)
    wait_for_beats(ledger)
    assert ledger.expire(spec.id) == (1, 1, 1)
    assert ledger.view(spec.id).in_flight == 4
    assert ending.verdict is None
    assert [view.busy for view in ledger.workers()] == [1]


def test_a_slot_hears_that_another_has_its_shard(ledger: Ledger, heartbeat: Heartbeat) -> None:
    spec = opened(ledger, 2)
    lost, kept = leased(ledger, spec, "lost"), leased(ledger, spec, "kept")
    ledger.release(lost, "taken away")
    endings = Ending(), Ending()
    heartbeat.hold(Held(lost, lambda: 0, endings[0]))
    heartbeat.hold(Held(kept, lambda: 0, endings[1]))
    assert endings[0].wait() == "lost"
    wait_for_beats(ledger)
    assert endings[1].verdict is None


def test_a_slot_hears_that_its_job_is_cancelled(ledger: Ledger, heartbeat: Heartbeat) -> None:
    spec = opened(ledger, 1)
    ending = Ending()
    heartbeat.hold(Held(leased(ledger, spec), lambda: 0, ending))
    ledger.cancel(spec.id)
    assert ending.wait() == "stop"


def test_beats_go_on_when_the_ledger_comes_back(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path)
    server.start()
    try:
        ledger = Ledger(server.client)
        heartbeat = Heartbeat(ledger, TTL, lambda busy: worker("tiny", busy=busy))
        heartbeat.start()
        spec = opened(ledger, 1, new_spec())
        ending = Ending()
        heartbeat.hold(Held(leased(ledger, spec), lambda: 2, ending))
        server.restart()
        wait_for_beats(ledger)
        assert ending.verdict is None
        assert ledger.view(spec.id).leased == 1
        server.kill()
        heartbeat.stop()
    finally:
        server.kill()


def test_a_worker_that_stops_is_gone_from_the_list(ledger: Ledger) -> None:
    heartbeat = Heartbeat(ledger, TTL, lambda busy: worker("tiny", busy=busy))
    heartbeat.start()
    assert len(ledger.workers()) == 1
    heartbeat.stop()
    assert ledger.workers() == []
