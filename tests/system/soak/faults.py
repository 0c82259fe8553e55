"""What a soak does to a fleet: each fault begins, lasts for as long as its block, and is over after it.

A fault counts when it was really injected: one that finds nothing to hurt yields and says nothing.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from jobs import orders
from jobs.broker import CONTROL_QUEUE, queue_key
from jobs.gc import Collector
from jobs.ledger import Ledger
from tests.proxy import TcpProxy
from tests.system.soak.mill import Seat, SoakedMill

Fault = Callable[[SoakedMill], AbstractContextManager[None]]

_UNACKED = ("pm:bk:unacked", "pm:bk:unacked_index")
_ENGINE_EVERY_S = 10.0
"""An engine that dies more often while it is restarted convicts rows that did nothing."""


def _seat(mill: SoakedMill, kind: str | None = None) -> Seat | None:
    seats = [seat for seat in mill.seats if seat.process.alive and kind in (None, seat.kind)]
    return mill.rng.choice(seats) if seats else None


def _some_job(mill: SoakedMill) -> str | None:
    return mill.rng.choice(mill.running).job.id if mill.running else None


# --- processes ------------------------------------------------------------------------------------------------------


@contextmanager
def process_killed(mill: SoakedMill) -> Iterator[None]:
    if (seat := _seat(mill)) is not None:
        mill.note(f"{seat.kind} killed", seat.process.name)
        seat.process.kill()
    yield


@contextmanager
def process_asked_to_stop(mill: SoakedMill) -> Iterator[None]:
    if (seat := _seat(mill)) is not None and not seat.process.stopped:
        mill.note(f"{seat.kind} asked to stop", seat.process.name)
        seat.process.send(signal.SIGTERM)
    yield


@contextmanager
def process_frozen(mill: SoakedMill) -> Iterator[None]:
    """For up to three times the life of a lease, and longer than the block."""
    if (seat := _seat(mill)) is not None and seat.wakes_at is None:
        mill.freeze(seat)
        mill.note(f"{seat.kind} frozen", seat.process.name)
    yield


@contextmanager
def engine_killed(mill: SoakedMill) -> Iterator[None]:
    engines = [worker.engine_pid for worker in mill.fleet.ledger.workers() if worker.engine_pid]
    if engines and not mill.has_poison and time.monotonic() - mill.engine_died_at > _ENGINE_EVERY_S:
        mill.engine_died_at = time.monotonic()
        mill.note("engine killed")
        with suppress(ProcessLookupError):  # it went with its worker
            os.kill(mill.rng.choice(engines), signal.SIGKILL)
    yield


# --- the ledger's server, and the way to it -------------------------------------------------------------------------


@contextmanager
def valkey_killed(mill: SoakedMill) -> Iterator[None]:
    mill.note("valkey killed")
    mill.fleet.valkey.kill()
    yield
    mill.fleet.valkey.start()


@contextmanager
def valkey_frozen(mill: SoakedMill) -> Iterator[None]:
    pid = int(mill.fleet.valkey.client.info("server")["process_id"])
    mill.note("valkey frozen")
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextmanager
def valkey_read_only(mill: SoakedMill) -> Iterator[None]:
    """As after a failover: it follows a server that is not there."""
    mill.note("valkey read-only")
    mill.fleet.valkey.client.replicaof("127.0.0.1", 1)
    yield
    mill.fleet.valkey.client.replicaof("NO", "ONE")


@contextmanager
def valkey_full(mill: SoakedMill) -> Iterator[None]:
    mill.note("valkey full")
    mill.fleet.valkey.client.config_set("maxmemory", 1)
    yield
    mill.fleet.valkey.client.config_set("maxmemory", 0)


@contextmanager
def ledger_emptied(mill: SoakedMill) -> Iterator[None]:
    """The mill recovers what is lost once the block is over."""
    mill.note("ledger emptied")
    mill.fleet.valkey.client.flushall()
    yield


def _proxy(mill: SoakedMill) -> tuple[str, TcpProxy]:
    return mill.rng.choice(list(mill.proxies.items()))


@contextmanager
def network_gone(mill: SoakedMill) -> Iterator[None]:
    name, proxy = _proxy(mill)
    mill.note(f"{name} swallowed")
    with proxy.black_hole():
        yield


@contextmanager
def server_refuses(mill: SoakedMill) -> Iterator[None]:
    name, proxy = _proxy(mill)
    mill.note(f"{name} refuses")
    with proxy.refusing():
        yield


@contextmanager
def network_slow(mill: SoakedMill) -> Iterator[None]:
    name, proxy = _proxy(mill)
    mill.note(f"{name} slow")
    with proxy.delaying(mill.rng.uniform(0.02, 0.5)):
        yield


@contextmanager
def connections_cut(mill: SoakedMill) -> Iterator[None]:
    name, proxy = _proxy(mill)
    mill.note(f"{name} cut")
    proxy.cut_all()
    yield


@contextmanager
def answer_cut(mill: SoakedMill) -> Iterator[None]:
    name, proxy = _proxy(mill)
    mill.note(f"{name} cut in an answer")
    proxy.cut_after(mill.rng.randrange(1, 20_000))
    yield


@contextmanager
def reply_lost(mill: SoakedMill) -> Iterator[None]:
    """Of the next call of one of the ledger's scripts, once or several times running."""
    script = mill.rng.choice(list(Ledger(mill.fleet.valkey.client)._scripts.values()))
    mill.note("reply of a script lost")
    mill.proxies["ledger"].drop_reply_to(*[script.sha.encode()] * mill.rng.randint(1, 3))
    yield


# --- tokens ---------------------------------------------------------------------------------------------------------


def _queues(mill: SoakedMill) -> list[str]:
    return [mill.fleet.work_queue(), queue_key(CONTROL_QUEUE)]


@contextmanager
def tokens_deleted(mill: SoakedMill) -> Iterator[None]:
    if mill.fleet.valkey.client.delete(*_queues(mill), *_UNACKED):
        mill.note("tokens deleted")
    yield


@contextmanager
def tokens_doubled(mill: SoakedMill) -> Iterator[None]:
    client = mill.fleet.valkey.client
    for queue in _queues(mill):
        if messages := client.lrange(queue, 0, -1):
            client.rpush(queue, *messages)
            mill.note("tokens doubled")
    yield


# --- what people do -------------------------------------------------------------------------------------------------


@contextmanager
def job_cancelled(mill: SoakedMill) -> Iterator[None]:
    if (job_id := _some_job(mill)) and orders.cancel(job_id, mill.fleet.ledger, mill.fleet.stores) == "ok":
        mill.note("job cancelled", job_id)
    yield


@contextmanager
def job_paused(mill: SoakedMill) -> Iterator[None]:
    """The mill resumes it once the block is over."""
    if (job_id := _some_job(mill)) and orders.pause(job_id, mill.fleet.ledger, mill.fleet.stores) == "ok":
        mill.paused.add(job_id)
        mill.note("job paused", job_id)
    yield


@contextmanager
def job_given_another_place(mill: SoakedMill) -> Iterator[None]:
    ledger, stores = mill.fleet.ledger, mill.fleet.stores
    priority, weight = mill.rng.randint(-2, 2), mill.rng.choice([0.5, 1.0, 4.0])
    job_id = _some_job(mill)
    if job_id and orders.set_terms(job_id, ledger, stores, priority=priority, weight=weight) == "ok":
        mill.note("job given another place", job_id)
    yield


@contextmanager
def garbage_collected(mill: SoakedMill) -> Iterator[None]:
    """With no patience at all: only what belongs to jobs that have ended may go."""
    fleet = mill.fleet
    collector = Collector(fleet.settings.storage_url, fleet.ledger, fleet.stores, before=time.time() + 1)
    mill.note("garbage collected", f"{len(list(collector.collect()))} objects")
    yield


ACTIONS: tuple[Fault, ...] = (
    process_killed,
    process_killed,
    process_frozen,
    process_asked_to_stop,
    engine_killed,
    connections_cut,
    answer_cut,
    reply_lost,
    reply_lost,
    tokens_deleted,
    tokens_doubled,
    job_cancelled,
    job_paused,
    job_given_another_place,
    garbage_collected,
)
"""Those that ask the ledger something, or nothing: they come first. What is there twice comes twice as often."""

OUTAGES: tuple[Fault, ...] = (
    valkey_killed,
    valkey_frozen,
    valkey_read_only,
    valkey_full,
    ledger_emptied,
    network_gone,
    server_refuses,
    network_slow,
)
"""Those in which the ledger may not answer, or knows no job: they come last, are over first, and one at a time."""
