"""What all slots of a worker share, and how they hear that it is to stop."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from jobs.broker import Tokens
from jobs.ledger import EQUAL_SHARES, FairShare, Ledger
from jobs.retry import KeptAnswers
from jobs.storage import Stores
from workers.company import Company
from workers.heartbeat import Heartbeat
from workers.host import EngineHost
from workers.twins import SharedByJob


@dataclass(frozen=True, slots=True)
class SlotContext:
    """`window` is how many rows of a shard may be in the engine at once; `at_once` how many shards a slot may have in
    work."""

    ledger: Ledger
    stores: Stores
    tokens: Tokens
    host: EngineHost
    heartbeat: Heartbeat
    stopping: "Stopping"
    lease_ttl: float
    window: int
    at_once: int
    engine_name: str
    worker_id: str
    kept: KeptAnswers
    share: FairShare = EQUAL_SHARES
    shared: SharedByJob = field(default_factory=SharedByJob)
    company: Company = field(default_factory=Company)


class Stopping:
    """The worker was asked to stop. Slots that wait for answers are woken."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._listeners: set[Callable[[], None]] = set()

    def set(self) -> None:
        """May be called from a signal handler: it takes no lock that the interrupted thread could hold."""
        self._event.set()
        threading.Thread(target=self._wake, name="stop", daemon=True).start()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def listen(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.add(listener)
        if self._event.is_set():
            listener()

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _wake(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
