"""What Celery and Redis do to messages: they come twice, not at all, late, or in another order, and no row notices."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs.broker import CONTROL_QUEUE, PLAN, Tokens, make_app, queue_key
from jobs.errors import EXIT_USAGE
from jobs.settings import Settings
from jobs.spec import JobSpec
from jobs.submit import enter
from tests.problems.conftest import faulty
from tests.problems.faulty_worker import LOST, redeliver_soon, stop_with_a_message_in_hand
from tests.proxy import TcpProxy, tcp_proxy
from tests.servers import ValkeyServer
from tests.system.fleet import END_S, Fleet, Job
from tests.system.history import commands
from tests.system.mill import PAGEMILL, wait_until


def sent(fleet: Fleet, *, again: bool = False) -> int:
    """How many messages were put into the queue of the model so far; `again`: how many of these for the second time."""
    fleet.valkey.wait_until_written()
    pushed = [args for verb, *args in commands(fleet.valkey.data_dir) if verb in ("LPUSH", "RPUSH")]
    messages = [json.loads(message) for queue, *some in pushed if queue == fleet.work_queue() for message in some]
    return len([message for message in messages if not again or message["headers"].get("redelivered")])


def test_a_shard_that_takes_longer_than_the_visibility_timeout_runs_once(fleet: Fleet) -> None:
    """celery#5935, #5306, #6229: Redis hands a task out again that is not acknowledged within the visibility timeout,
    so that whatever takes longer runs twice at once, and then a third time.

    Twelve hours here; this worker's broker waits for one second, and a shard takes three.
    """
    fleet.control()
    job = fleet.submit(rows=8)
    worker = faulty(fleet, redeliver_soon, step_s=3)
    fleet.wait_for(job, lambda view: view.leased, "a shard in work")
    fleet.worker()
    fleet.finished(job)
    assert sent(fleet, again=True)
    assert fleet.tries(job) == {0: 1, 1: 1}
    assert worker.alive


def test_a_message_that_is_lost_as_its_worker_stops_is_sent_again(fleet: Fleet) -> None:
    """celery#7950, #1392: a task that was fetched just as the worker shut down was in nobody's hands any more, and
    nobody missed it."""
    fleet.control()
    job = fleet.submit(rows=4)
    stopped = faulty(fleet, stop_with_a_message_in_hand)
    assert stopped.wait_for_death() == 0
    assert LOST in stopped.log.read_text()
    assert fleet.tries(job) == {}
    fleet.worker()
    fleet.finished(job)
    assert sent(fleet) > 1
    assert not sent(fleet, again=True)


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[TcpProxy]:
    """Between all of the fleet's processes and Redis."""
    with tcp_proxy(fleet.valkey.url.partition("?")[0]) as proxy:
        fleet.redis_url = proxy.redis_url
        yield proxy


def test_workers_go_on_after_each_of_many_broken_connections(fleet: Fleet, proxy: TcpProxy) -> None:
    """celery#8030, #8091, #10205, #10302: after its connection to Redis was reset, or had fallen silent, a worker said
    that it was ready, and took no task any more until somebody started it again."""
    processes = [fleet.control(), fleet.worker(step_s=0.2)]
    fleet.finished(fleet.submit(rows=4))
    for _ in range(3):
        proxy.cut_all()
        fleet.finished(fleet.submit(rows=4))
    assert proxy.connections_cut >= 3 * len(processes)
    job = fleet.submit(rows=24)
    fleet.wait_for(job, lambda view: view.settled, "a shard that is done")
    with proxy.black_hole():
        wait_until(lambda: proxy.bytes_swallowed, END_S, "words that nobody heard")
    fleet.finished(job)
    fleet.finished(fleet.submit(rows=4))
    assert all(process.alive for process in processes)


def test_a_submit_whose_message_the_broker_did_not_confirm_is_a_submit(fleet: Fleet, proxy: TcpProxy) -> None:
    """xagent#1616, celery#4296: publishing raised, the job was taken back, and the message had arrived all the same;
    or it had not, and the job stayed in the database for ever. The client's broker alone is behind the proxy."""
    tokens = Tokens(make_app(Settings(redis_url=proxy.redis_url)))
    fleet.redis_url = None
    sent_and_unconfirmed, not_sent = fleet.prepare(rows=8), fleet.prepare(rows=8)
    proxy.drop_reply_to(b"LPUSH")
    enter(sent_and_unconfirmed.spec, fleet.ledger, fleet.stores, tokens)
    assert proxy.replies_dropped == 1
    queued = fleet.ledger.client.llen(queue_key(CONTROL_QUEUE))
    assert queued >= 1
    with proxy.refusing():
        assert not tokens.send(PLAN, not_sent.id)
        enter(not_sent.spec, fleet.ledger, fleet.stores, tokens)
    assert proxy.connections_refused
    assert fleet.ledger.client.llen(queue_key(CONTROL_QUEUE)) == queued
    fleet.control()
    fleet.worker()
    for job in (sent_and_unconfirmed, not_sent):
        fleet.finished(job)
        assert fleet.tries(job) == {0: 1, 1: 1}
        assert fleet.history.states(job.id) == ["validating", "in_progress", "finalizing", "completed"]


def test_a_redis_cluster_is_refused_in_so_many_words(tmp_path: Path) -> None:
    """celery#9436, #2852: a worker that was given the URL of a Redis Cluster started, and raised CROSSSLOT, MOVED or
    nothing at all when there was work."""
    cluster = ValkeyServer(tmp_path, "--cluster-enabled", "yes")
    cluster.start()
    try:
        env = {**os.environ, **cluster.environment()}
        done = subprocess.run(
            [*PAGEMILL, "worker", "--control"], env=env, capture_output=True, text=True, timeout=END_S
        )
    finally:
        cluster.kill()
    assert done.returncode == EXIT_USAGE
    assert "is a Redis Cluster, which Celery cannot use as a broker" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_of_everything_make_one_job_of_one_due_run(fleet: Fleet) -> None:
    """redbeat#208, celery#2856: after a connection had broken two schedulers were at work, and each due task was sent
    twice. A run is known by its key here, and whoever comes second finds it there."""
    for _ in range(2):
        fleet.control()
    fleet.worker()
    runs = [fleet.prepare(rows=8, idempotency_key="nightly at 2026-10-25T01:00Z") for _ in range(2)]
    together = threading.Barrier(2)

    def submit(job: Job) -> JobSpec:
        together.wait(END_S)
        return enter(job.spec, fleet.ledger, fleet.stores, fleet.tokens)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(submit, runs)
    assert one == other
    (job,) = (run for run in runs if run.spec == one)
    fleet.finished(job)
    assert fleet.ledger.job_ids(None) == [one.id]
    assert fleet.history.states(one.id) == ["validating", "in_progress", "finalizing", "completed"]
    assert fleet.tries(job) == {0: 1, 1: 1}
