"""Child processes of one command: restarted when they die, ended when it ends, gone even if it is killed."""

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs.errors import EXIT_USAGE, PagemillError, ServiceUnreachable, UsageError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_RESTART_DELAY_S, _MAX_RESTART_DELAY_S = 0.2, 10.0
_LONG_LIFE_S, _MAX_SHORT_LIVES = 30.0, 5
_READY_S, _POLL_S = 30.0, 0.05
_TAIL_BYTES = 4096
_ERROR, _HINT = "error: ", "hint: "


@dataclass(frozen=True)
class Child:
    """A process to keep running. One that exits with a usage error is not started again: it would say the
    same. Nor is one that dies young five times in a row."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None


class Supervisor:
    """Runs children until `stop`. Each has a thread of its own, which starts it, waits for it and starts it again."""

    def __init__(self, log_dir: Path, *, grace: float) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._grace = grace
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._order: list[str] = []
        self.failed = threading.Event()
        self.failure: PagemillError | None = None

    def start(self, child: Child) -> None:
        """Start a child; returns once it is ready, if it can tell. Raises ServiceUnreachable if it never is."""
        thread = threading.Thread(target=self._keep, args=(child,), name=f"keep-{child.name}", daemon=True)
        self._threads.append(thread)
        self._order.append(child.name)
        thread.start()
        if child.ready is None:
            return
        deadline = time.monotonic() + _READY_S
        while not child.ready():
            if self.failed.wait(_POLL_S):
                raise self.failure or PagemillError(f"{child.name} failed.")
            if time.monotonic() > deadline:
                raise ServiceUnreachable(
                    f"{child.name} did not answer within {_READY_S:g} s.", hint=f"See {self.log_path(child.name)}."
                )

    def pid(self, name: str) -> int | None:
        with self._lock:
            process = self._processes.get(name)
            return process.pid if process else None

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def stop(self) -> None:
        """End the children, the last started first: SIGTERM, and SIGKILL after the grace."""
        self._stopping.set()
        for name in reversed(self._order):
            with self._lock:
                process = self._processes.get(name)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(self._grace)
            except subprocess.TimeoutExpired:
                log.warning("%s did not stop within %g s and is killed", name, self._grace)
                process.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _keep(self, child: Child) -> None:
        delay = _RESTART_DELAY_S
        short_lives = 0
        while not self._stopping.is_set():
            born = time.monotonic()
            try:
                code = self._run(child)
            except OSError as error:
                self._fail(PagemillError(f"{child.name} cannot be started: {error}"))
                return
            if self._stopping.is_set():
                return
            long_life = time.monotonic() - born > _LONG_LIFE_S
            short_lives = 0 if long_life else short_lives + 1
            if code == EXIT_USAGE or short_lives == _MAX_SHORT_LIVES:
                kind = UsageError if code == EXIT_USAGE else PagemillError
                words, hint = self._last_words(child.name)
                self._fail(kind(f"{child.name} cannot run: {words}", hint=hint))
                return
            delay = _RESTART_DELAY_S if long_life else min(delay * 2, _MAX_RESTART_DELAY_S)
            log.warning(
                "%s ended with code %s and is started again; see %s", child.name, code, self.log_path(child.name)
            )
            self._stopping.wait(delay)

    def _run(self, child: Child) -> int:
        with self.log_path(child.name).open("ab") as out:
            process = subprocess.Popen(
                child.argv,
                env={**os.environ, **child.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # The terminal's Ctrl-C is for the command; it decides in which order its children end.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        with self._lock:
            self._processes[child.name] = process
        if self._stopping.is_set():
            process.terminate()
        return process.wait()

    def _fail(self, failure: PagemillError) -> None:
        self.failure = failure
        self.failed.set()

    def _last_words(self, name: str) -> tuple[str, str]:
        """The error that a child ended with, and its hint, as pagemill's commands print them; else its last line."""
        with self.log_path(name).open("rb") as file:
            file.seek(max(0, self.log_path(name).stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        hint = lines.pop() if len(lines) > 1 and lines[-1].startswith(_HINT) else ""
        return lines[-1].removeprefix(_ERROR) if lines else "it said nothing", hint.removeprefix(_HINT)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
