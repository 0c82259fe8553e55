"""The fault matrix, second part: Valkey freezes, refuses, fills up, goes back in time, or comes back with nothing.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer.
What takes a minute or ten by default is scaled: a lease lives for two seconds, a sweep comes twice a second, and where
it says so a client of the ledger waits a fifth of a second for an answer instead of ten.
"""

import signal
from pathlib import Path

import pytest

from jobs.broker import CONTROL_QUEUE, queue_key
from jobs.errors import LedgerFull
from jobs.recover import lost_jobs
from tests.proxy import tcp_proxy
from tests.servers import ValkeyServer
from tests.system.fleet import END_S, SHARD_ROWS, Fleet
from tests.system.mill import wait_until

STEP_S = 0.15
"""Of the stub engine: a job of six shards takes about a second."""


# --- 12: half-open ----------------------------------------------------------------------------------------------------


def test_12_valkey_freezes_and_thaws(fleet: Fleet, own_valkey: ValkeyServer) -> None:
    """It is stopped until both have once given up, with all their retries; not for sixty seconds."""
    fleet.redis_url = f"{own_valkey.url}&socket_timeout=0.2"
    control, worker = fleet.control(), fleet.worker(step_s=STEP_S)
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.done, "rows done")
    own_valkey.send(signal.SIGSTOP)
    for process in (control, worker):
        process.wait_for_line("Timeout reading from socket")
    own_valkey.send(signal.SIGCONT)
    fleet.finished(job)
    fleet.wait_for_signs_of_life()


def test_12_a_worker_that_the_ledger_does_not_hear_loses_its_shards_and_comes_back(
    fleet: Fleet, own_valkey: ValkeyServer
) -> None:
    """Nothing passes between the two, and neither is told."""
    fleet.control()
    with tcp_proxy(own_valkey.url.partition("?")[0]) as proxy:
        cut_off = fleet.worker(step_s=STEP_S, PAGEMILL_REDIS_URL=proxy.redis_url)
        job = fleet.submit()
        held = wait_until(lambda: fleet.owners(job), END_S, "shards in work")
        with proxy.black_hole():
            other = fleet.worker()
            manifest = fleet.finished(job)
            assert proxy.bytes_swallowed
        assert not {segment.record.attempt for segment in manifest.segments} & set(held.values())
        other.kill()
        fleet.finished(fleet.submit())
        assert cut_off.alive


# --- 13: read-only ----------------------------------------------------------------------------------------------------


def test_13_valkey_becomes_a_replica_of_nobody_for_a_while(fleet: Fleet, own_valkey: ValkeyServer) -> None:
    control, worker = fleet.control(), fleet.worker(step_s=STEP_S)
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.done, "rows done")
    own_valkey.client.replicaof("127.0.0.1", "1")
    for process in (control, worker):
        process.wait_for_line("read only")
    own_valkey.client.replicaof("NO", "ONE")
    fleet.finished(job)
    fleet.wait_for_signs_of_life()


# --- 14: full ---------------------------------------------------------------------------------------------------------


def test_14_a_full_valkey_refuses_jobs_and_keeps_those_it_has(fleet: Fleet, own_valkey: ValkeyServer) -> None:
    control, worker = fleet.control(), fleet.worker(step_s=STEP_S)
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.done, "rows done")
    own_valkey.client.config_set("maxmemory", 1_000_000)
    for process in (control, worker):
        process.wait_for_line("used memory > 'maxmemory'")
    refused = fleet.prepare()
    with pytest.raises(LedgerFull, match=r"1,000,000 bytes"):
        fleet.enter(refused)
    own_valkey.client.config_set("maxmemory", 0)
    fleet.finished(job)
    fleet.wait_for_signs_of_life()
    assert list(lost_jobs(fleet.settings.storage_url, fleet.ledger, fleet.stores)) == []


def test_14_a_valkey_that_is_nearly_full_ends_the_jobs_it_has(fleet: Fleet, own_valkey: ValkeyServer) -> None:
    fleet.control()
    fleet.worker(step_s=STEP_S)
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.done, "rows done")
    own_valkey.client.config_set("maxmemory", int(own_valkey.client.info("memory")["used_memory"] * 1.2))
    with pytest.raises(LedgerFull, match="up to 75%"):
        fleet.submit()
    fleet.finished(job)


# --- 15: back in time -------------------------------------------------------------------------------------------------


def test_15_valkey_loses_commits(fleet: Fleet, own_valkey: ValkeyServer, tmp_path: Path) -> None:
    fleet.control()
    fleet.worker(step_s=STEP_S)
    job = fleet.submit(10 * SHARD_ROWS)
    fleet.wait_for(job, lambda view: view.settled, "a commit")
    own_valkey.copy_data(tmp_path / "copy")
    before = fleet.view(job).settled
    fleet.wait_for(job, lambda view: view.settled > before + 1, "more commits")
    fleet.roll_back(tmp_path / "copy")
    fleet.finished(job)
    assert any(len(attempts) > 1 for attempts in fleet.history.commits(job.id).values()), "no commit was lost"
    fleet.wait_for_signs_of_life()


def test_15_valkey_forgets_that_a_job_is_done(fleet: Fleet, own_valkey: ValkeyServer, tmp_path: Path) -> None:
    """Its shards run again for nothing: the manifest that is there stays the result."""
    fleet.control()
    fleet.worker(step_s=STEP_S)
    job = fleet.submit()
    fleet.wait_for(job, lambda view: view.settled, "a commit")
    own_valkey.copy_data(tmp_path / "copy")
    manifest = fleet.finished(job)
    output = fleet.stores.head(job.spec.output_url)
    fleet.roll_back(tmp_path / "copy")
    assert fleet.view(job).state == "in_progress"
    assert fleet.finished(job) == manifest
    assert fleet.stores.head(job.spec.output_url) == output


@pytest.mark.parametrize("to", ["before the job", "nothing"])
def test_15_valkey_forgets_the_job(to: str, fleet: Fleet, own_valkey: ValkeyServer, tmp_path: Path) -> None:
    fleet.control()
    fleet.worker(step_s=STEP_S)
    fleet.finished(fleet.submit(SHARD_ROWS))
    own_valkey.copy_data(tmp_path / "copy")
    job = fleet.submit(10 * SHARD_ROWS)
    fleet.wait_for(job, lambda view: view.settled > 2, "commits")
    kept = fleet.ledger.records(job.id)
    fleet.roll_back(None if to == "nothing" else tmp_path / "copy")
    assert job.id in fleet.recover()
    manifest = fleet.finished(job)
    assert {segment.shard: segment.record for segment in manifest.segments if segment.shard in kept} == kept
    assert not fleet.tries(job).keys() & kept.keys(), "a committed shard ran again"
    fleet.wait_for_signs_of_life()


def test_15_valkey_forgets_a_job_that_is_done(fleet: Fleet) -> None:
    fleet.control()
    fleet.worker()
    job = fleet.submit()
    manifest = fleet.finished(job)
    fleet.roll_back(None)
    assert fleet.recover() == [job.id]
    assert fleet.finished(job) == manifest
    assert fleet.tries(job) == {}


def test_15_a_job_is_recovered_where_valkey_was_emptied_and_no_connection_broke(
    fleet: Fleet, own_valkey: ValkeyServer
) -> None:
    """Celery's bindings of its queues are gone as well, and nobody has reason to declare them again."""
    fleet.control()
    fleet.worker(step_s=STEP_S)
    job = fleet.submit(10 * SHARD_ROWS)
    fleet.wait_for(job, lambda view: view.settled, "a commit")
    own_valkey.client.flushall()
    assert fleet.recover() == [job.id]
    own_valkey.client.delete(fleet.work_queue(), queue_key(CONTROL_QUEUE))
    fleet.finished(job)


# --- 16: empty, under those who hold leases ---------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["row.asked", "segment.put", "segment.recorded"])
def test_16_a_lease_of_a_ledger_that_is_gone_commits_nothing(point: str, fleet: Fleet) -> None:
    """The worker is stopped while it holds the lease, and told nothing."""
    fleet.control()
    worker = fleet.worker(f"{point}:stop", slots=1)
    job = fleet.submit()
    worker.wait_until_stopped()
    held = fleet.owners(job)
    assert held
    fleet.roll_back(None)
    worker.send(signal.SIGCONT)
    worker.wait_for_line("abandoned (stop)")
    assert not fleet.has_result(job)
    assert fleet.recover() == [job.id]
    manifest = fleet.finished(job)
    if point != "row.asked":
        assert manifest.segments[0].record.attempt in held.values(), "a segment that is whole was made twice"
    assert worker.alive
