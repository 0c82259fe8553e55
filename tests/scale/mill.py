"""Real processes around an engine that answers at once, and the most memory that each of them has had."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from jobs.ledger import Ledger
from jobs.records import JobView, Manifest
from jobs.storage import Stores
from tests.scale.stub_worker import MODEL
from tests.servers import ValkeyServer, valkey
from tests.system.mill import PAGEMILL, wait_until

_STUB_WORKER = [sys.executable, "-m", "tests.scale.stub_worker"]
_START_S = 60


@dataclass(frozen=True)
class Measured:
    """What a job took. `peaks` are the most bytes that each process has had resident since it began.

    `planning_cpu_s` is the control worker's processor time, and `ledger_bytes` what Valkey held more than before, with
    a record of each shard.
    """

    rows: int
    input_bytes: int
    shards: int
    planning_cpu_s: float
    planning_peak: int
    peaks: dict[str, int]
    ledger_bytes: int
    seconds: dict[str, float]

    @property
    def planning_mb_per_s(self) -> float:
        return self.input_bytes / 1e6 / self.planning_cpu_s


class Mill:
    """Valkey, a control worker and model workers on a folder."""

    def __init__(self, folder: Path, server: ValkeyServer, workers: int) -> None:
        self._server = server
        self._env = {**os.environ, **server.environment(), "PAGEMILL_STORAGE": f"file://{folder}/store"}
        self._log = folder / "processes.log"
        self._ledger = Ledger(server.client)
        self._stores = Stores(server.settings(storage=f"file://{folder}/store"))
        self._control = self._start([*PAGEMILL, "worker", "--control"])
        self._workers = [self._start(_STUB_WORKER) for _ in range(workers)]
        wait_until(lambda: len(self._ledger.workers()) == workers, _START_S, "live workers")

    def run(self, source: Path, options: Sequence[str], timeout_s: float) -> Measured:
        """Submit a job, and see it to its end. Raises AssertionError unless each of its rows is answered."""
        before = self._ledger_bytes()
        cpu_before = _cpu_s(self._control)
        began = time.monotonic()
        job_id, submit_peak = self._submit([str(source), *options])
        self._wait(job_id, timeout_s, "planned", lambda view: view.state != "validating")
        planned = time.monotonic()
        planning_cpu_s, planning_peak = _cpu_s(self._control) - cpu_before, peak_bytes(self._control.pid)
        view = self._wait(job_id, timeout_s, "answered", lambda view: view.settled == view.shards)
        answered, ledger_bytes = time.monotonic(), self._ledger_bytes() - before
        view = self._wait(job_id, timeout_s, "ended", lambda view: view.terminal)
        manifest = Manifest.model_validate_json(self._stores.read(self._ledger.spec(job_id).layout.manifest))
        assert (view.state, view.done, manifest.output.lines) == ("completed", view.rows, view.rows), view
        peaks = {"submit": submit_peak, "control": peak_bytes(self._control.pid)}
        for number, worker in enumerate(self._ledger.workers()):
            peaks[f"worker {number}"] = peak_bytes(worker.pid)
            if worker.engine_pid is not None:
                peaks[f"engine {number}"] = peak_bytes(worker.engine_pid)
        return Measured(
            rows=view.done,
            input_bytes=source.stat().st_size,
            shards=len(manifest.segments),
            planning_cpu_s=planning_cpu_s,
            planning_peak=planning_peak,
            peaks=peaks,
            ledger_bytes=ledger_bytes,
            seconds={
                "plan": planned - began,
                "run": answered - planned,
                "assemble": time.monotonic() - answered,
            },
        )

    def close(self) -> None:
        for process in (self._control, *self._workers):
            process.send_signal(signal.SIGTERM)
        for process in (self._control, *self._workers):
            process.wait(_START_S)

    def _start(self, argv: Sequence[str]) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _submit(self, arguments: Sequence[str]) -> tuple[str, int]:
        argv = [*PAGEMILL, "submit", "--model", MODEL, *arguments]
        peak = 0
        with subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, text=True) as process:
            while process.poll() is None:
                peak = max(peak, peak_bytes(process.pid))
                time.sleep(0.01)
            assert process.stdout is not None
            return process.stdout.read().strip(), peak

    def _wait(self, job_id: str, timeout_s: float, what: str, met: Callable[[JobView], bool]) -> JobView:
        def looks_so() -> JobView | None:
            view = self._ledger.view(job_id)
            return view if met(view) or view.terminal else None

        return wait_until(looks_so, timeout_s, f"{job_id} {what}")

    def _ledger_bytes(self) -> int:
        return int(self._server.client.info("memory")["used_memory"])


@contextmanager
def mill(folder: Path, workers: int = 1) -> Iterator[Mill]:
    """A mill that is at work; its processes are gone after the block."""
    with valkey(folder / "state") as server:
        found = Mill(folder, server, workers)
        try:
            yield found
        finally:
            found.close()


def peak_bytes(pid: int) -> int:
    """The most bytes that a process has had resident; 0 for one that has ended.

    Not what `getrusage` says, which of a new process is at least what its parent had.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_s(process: "subprocess.Popen[bytes]") -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system
