"""One thread that keeps all leases of a worker alive, and tells a slot when its lease is none any more."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from jobs.ledger import Lease, Ledger, Verdict
from jobs.records import WorkerView

log = logging.getLogger(__name__)

_MAX_INTERVAL_S = 2.0
"""Beats also carry progress and bring cancellations, so they come more often than the lease needs."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease in work: how far it is, and whom to tell that it is over."""

    lease: Lease
    rows_done: Callable[[], int]
    on_end: Callable[[Verdict], None]


class Heartbeat:
    """Beats for what `hold` was given until `drop` takes it back. A ledger that does not answer is asked again."""

    def __init__(self, ledger: Ledger, ttl: float, describe: Callable[[int], WorkerView]) -> None:
        self._ledger = ledger
        self._ttl = ttl
        self._describe = describe
        self._interval = min(ttl / 3, _MAX_INTERVAL_S)
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._ledger.announce(self._describe(0), self._ttl)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        try:
            self._ledger.withdraw(self._describe(0).id)
        except RedisError as error:
            log.warning("could not say goodbye: %s", error)

    @property
    def holding(self) -> int:
        """How many leases are kept alive."""
        return len(self._held)

    def hold(self, held: Held) -> None:
        with self._lock:
            self._held[held.lease.attempt] = held

    def drop(self, lease: Lease) -> None:
        with self._lock:
            self._held.pop(lease.attempt, None)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with self._lock:
                held = list(self._held.values())
            try:
                self._ledger.announce(self._describe(len(held)), self._ttl)
                verdicts = self._ledger.beat([(h.lease, h.rows_done()) for h in held], self._ttl)
            except RedisError as error:
                # Nothing is wrong yet: a lease that runs out may still commit, if no other attempt has taken it.
                log.warning("no heartbeat, the ledger does not answer: %s", error)
                continue
            for one, verdict in zip(held, verdicts, strict=True):
                if verdict != "ok":
                    self.drop(one.lease)
                    one.on_end(verdict)
