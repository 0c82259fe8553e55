"""Whether a worker still takes what waits for it: that its process lives, and beats, does not say so.

Celery consumers have stopped to consume after a connection broke, without an error and for good. Leases see to it that
no row is lost by that; a worker that is started again sees to it that the job does not wait for ever.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_PATIENCE = 12
"""Looks, not seconds: who was stopped and goes on looks once and not at all that it missed. A minute is longer than
Celery waits at most before it connects again."""


class ConsumerWatch:
    """Calls `on_deaf` once, if for a minute tokens waited, a slot was free, and no task began or ended.

    `waiting` asks the broker how many tokens wait. A broker that does not answer is no fault of the worker's.
    """

    def __init__(self, waiting: Callable[[], int], slots: int, on_deaf: Callable[[], None]) -> None:
        self._waiting = waiting
        self._slots = slots
        self._on_deaf = on_deaf
        self._busy = 0
        self._lock = threading.Lock()
        self._quiet_looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consumer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def began(self, **_: Any) -> None:
        """A slot takes a token; a receiver of Celery's `task_prerun`."""
        self._count(1)

    def ended(self, **_: Any) -> None:
        """It is done with it; a receiver of Celery's `task_postrun`."""
        self._count(-1)

    def is_deaf(self) -> bool:
        """Whether it is time to give up on the consumer. To be asked every few seconds."""
        try:
            waits = self._has_free_slot() and self._waiting() > 0
        except RedisError:
            waits = False
        with self._lock:
            self._quiet_looks = self._quiet_looks + 1 if waits else 0
            return self._quiet_looks > _PATIENCE

    def _has_free_slot(self) -> bool:
        with self._lock:
            return self._busy < self._slots

    def _count(self, change: int) -> None:
        with self._lock:
            self._busy += change
            self._quiet_looks = 0

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            if self.is_deaf():
                log.error("tokens have waited for %g s, and this worker takes none: it ends", _PATIENCE * _LOOK_EVERY_S)
                self._on_deaf()
                return
