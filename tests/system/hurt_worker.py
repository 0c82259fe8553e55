"""The stub worker on a machine that fails at a test's word: the clock jumps, the disk is full, no engine starts.

Each fault is a file in the folder that the environment names, and lasts as long as the file is there. Waits that are
seconds in the product are fractions of one.
"""

import os
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import EngineDied
from jobs import spool
from tests.system import stub_engine
from workers import attempt, host, slot

FAULTS = "PAGEMILL_TEST_FAULTS"
CLOCK, DISK_FULL, NO_ENGINE = "clock", "disk-full", "no-engine"
LETHAL = "lethal"
"""A row with that in its prompt kills the worker itself when it is answered. No file switches this on."""

_real_time = time.time


def _faults() -> Path:
    return Path(os.environ[FAULTS])


def _jumped() -> float:
    """The time of day, off by the seconds that the file says. The monotonic clock is left alone, as by `date -s`."""
    clock = _faults() / CLOCK
    return _real_time() + (float(clock.read_text()) if clock.exists() else 0)


def _on_a_full_disk(opened: Callable[..., Any]) -> Callable[..., Any]:
    """Writes are refused by the kernel itself, when what is buffered is written out."""
    return lambda path, *rest: opened(Path("/dev/full") if (_faults() / DISK_FULL).exists() else path, *rest)


def _die_of_it(outcome_of: Callable[..., Any]) -> Callable[..., Any]:
    def of(row: Any, outputs: Any) -> Any:
        if LETHAL in str(row):
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome_of(row, outputs)

    return of


class _UnstableProcess(stub_engine.StubProcess):
    def start(self, timeout_s: float = 600) -> Any:
        if (_faults() / NO_ENGINE).exists():
            raise EngineDied("the test says that no engine starts here")
        return super().start(timeout_s)


if __name__ == "__main__":
    time.time = _jumped
    spool._opened = _on_a_full_disk(spool._opened)
    stub_engine.StubProcess = _UnstableProcess  # type: ignore[misc]
    attempt.outcome_of = _die_of_it(attempt.outcome_of)
    host._RESTART_DELAY_S, host._MAX_RESTART_DELAY_S = 0.05, 0.4
    slot._REST_S = attempt._FAULT_REST_S = 0.5
    runpy.run_module("tests.system.stub_worker", run_name="__main__")
