"""Places at which a process can be told to fail, so that tests crash it exactly where the protocol is thinnest.

    PAGEMILL_FAILPOINTS="segment.put:kill@2,plan.added:raise"

names a point, what happens there, and the how-manyeth time it is passed (the first, if it is not said). Each fires once
in a process. Nothing happens where the variable is not set, and a point that does not exist is refused: a test of a
fault that never comes would pass.
"""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from jobs.errors import ServiceUnreachable, UsageError

log = logging.getLogger(__name__)

VARIABLE = "PAGEMILL_FAILPOINTS"

POINTS = frozenset(
    {
        "submit.stored",  # job.json is written, the ledger knows nothing
        "submit.entered",  # the job is in the ledger, no token is sent
        "plan.stored",  # plan.jsonl is written, the ledger has no shard
        "plan.added",  # the shards are in the ledger, the job is not open
        "plan.opened",  # the job is open, no token is sent
        "lease.taken",  # a shard is leased, and nothing done
        "row.asked",  # a row is with the engine
        "segment.begun",  # all rows are answered, nothing is put
        "segment.put",  # output and errors are put, the record of the attempt is not
        "segment.recorded",  # the record is put, and not committed
        "shard.committed",  # the segment is the result, the slot goes on or returns
        "job.joined",  # output and error file are written, the manifest is not
        "job.published",  # the manifest is written, the ledger is not told
        "job.finished",  # all is done, the token is not acknowledged
    }
)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    """Until somebody sends SIGCONT."""
    # To this thread: sent to the process, another may take it, and this one goes on until it hears of that.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _raise() -> None:
    raise ServiceUnreachable("A failpoint says that a service does not answer.")


_ACTIONS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "raise": _raise}


class Armed(NamedTuple):
    """What happens at a point, and at which pass."""

    action: str
    at_pass: int


def parse(text: str) -> dict[str, Armed]:
    """The failpoints that a value of the variable arms. Raises UsageError for one that does not exist."""
    armed = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        point, _, rest = item.partition(":")
        action, _, at_pass = rest.partition("@")
        if point not in POINTS or action not in _ACTIONS or not (at_pass or "1").isdigit():
            raise UsageError(
                f"{VARIABLE}: there is no failpoint {item!r}.",
                hint=f"Write point:action@pass. Points: {', '.join(sorted(POINTS))}. Actions: {', '.join(_ACTIONS)}.",
            )
        armed[point] = Armed(action, int(at_pass or 1))
    return armed


class Failpoints:
    """The points of one process, and how often each was passed. Thread-safe."""

    def __init__(self, armed: Mapping[str, Armed]) -> None:
        self._armed = armed
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hit(self, point: str) -> None:
        if point not in self._armed:
            return
        with self._lock:
            self._passed[point] += 1
            fires = self._passed[point] == self._armed[point].at_pass
        if fires:
            log.warning("failpoint %s: %s", point, self._armed[point].action)
            _ACTIONS[self._armed[point].action]()


@cache
def _of_process() -> Failpoints:
    return Failpoints(parse(os.environ.get(VARIABLE, "")))


def failpoint(point: str) -> None:
    """Fail here, if the environment says so. Raises ServiceUnreachable where the action is to raise."""
    _of_process().hit(point)
