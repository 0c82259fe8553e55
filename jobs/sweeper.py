"""The clock of a control worker: a thread that sweeps."""

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from jobs.errors import PagemillError

log = logging.getLogger(__name__)


class Sweeper:
    """Calls `sweep` at a fixed interval, from `start` to `stop`.

    Not a Celery task: four plans of large files fill the slots of a control worker for as long as they take, and leases
    expire meanwhile as well.
    """

    def __init__(self, sweep: Callable[[], None], interval: float) -> None:
        self._sweep = sweep
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._sweep()
            except (RedisError, PagemillError) as error:
                log.warning("the sweep is left to the next one: %s", error)
            self._stopping.wait(self._interval)
