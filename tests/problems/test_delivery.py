"""What Celery and Redis do to messages: they come twice, not at all, late, or in another order, and no row notices."""

import json
from collections.abc import Iterator

import pytest

from tests.problems.conftest import faulty
from tests.problems.faulty_worker import LOST, redeliver_soon, stop_with_a_message_in_hand
from tests.proxy import TcpProxy, tcp_proxy
from tests.system.fleet import END_S, Fleet
from tests.system.history import commands
from tests.system.mill import wait_until


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


def test_workers_go_on_after_each_of_many_connection_resets(fleet: Fleet, proxy: TcpProxy) -> None:
    """celery#8030, #8091, #10205, #10302: after its connection to Redis was reset a worker reconnected, said that it
    was ready, and took no task any more until somebody started it again."""
    processes = [fleet.control(), fleet.worker()]
    fleet.finished(fleet.submit(rows=4))
    for _ in range(3):
        proxy.cut_all()
        fleet.finished(fleet.submit(rows=4))
    assert proxy.connections_cut >= 3 * len(processes)
    assert all(process.alive for process in processes)


def test_workers_go_on_after_a_connection_that_fell_silent(fleet: Fleet, proxy: TcpProxy) -> None:
    """The same threads: no reset came, and the connection was dead all the same. A job was in work at the time."""
    processes = [fleet.control(), fleet.worker(step_s=0.5)]
    job = fleet.submit(rows=24)
    fleet.wait_for(job, lambda view: view.settled, "a shard that is done")
    with proxy.black_hole():
        wait_until(lambda: proxy.bytes_swallowed > 1000, END_S, "words that nobody heard")
    fleet.finished(job)
    fleet.finished(fleet.submit(rows=4))
    assert all(process.alive for process in processes)
