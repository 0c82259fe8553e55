"""The job plane without a model: how many rows a second go from submit to manifest on this machine.

Valkey, the store, the ledger, slots and files are real; workers are processes of their own, and the engine in each is
a stub in a thread. Celery is left out: it carries a token a slot, and no rows.
"""

import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, cast

from engine.config import EngineConfig
from engine.process import EngineProcess
from jobs.broker import Tokens, make_app
from jobs.connection import connect
from jobs.control import Control
from jobs.errors import JobFailed
from jobs.formats.jsonl import dumps
from jobs.ledger import Ledger
from jobs.local.supervisor import Supervisor
from jobs.local.valkey import valkey_child
from jobs.sampling import Sampling
from jobs.settings import Settings
from jobs.spec import JobSpec, RecordRows
from jobs.storage import Stores
from jobs.submit import enter, prepare
from workers.app import slot_context, slots_for
from workers.host import EngineHost
from workers.slot import work
from workers.stub_engine import StubEngine

_MODEL = "stub"
_ROWS_IN_A_STEP = 256
_ANSWER_LIMIT = 16
_START_S, _POLL_S = 120, 0.005
_TEXT = "How many of the seven books on the second shelf would be left if Ada took every other one of them home? " * 2


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the way: what it took, by the clock."""

    name: str
    seconds: float
    rows_per_second: float


@dataclass(frozen=True, slots=True)
class JobsBench:
    """`peak_bytes` is the most memory that any one process had resident."""

    rows: int
    input_bytes: int
    workers: int
    storage: str
    stages: tuple[Stage, ...]
    peak_bytes: int

    @property
    def total(self) -> Stage:
        seconds = sum(stage.seconds for stage in self.stages)
        return Stage("submit to manifest", seconds, self.rows / seconds)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": asdict(self.total)}


class _Stopwatch:
    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.stages.append(Stage(name, seconds, self._rows / seconds))


def bench_jobs(rows: int, workers: int, settings: Settings) -> JobsBench:
    """Run a job of so many rows in `settings.state_dir`, with a Valkey of its own. Raises JobFailed if it loses any."""
    source = settings.state_dir / "input.jsonl"
    _write_input(source, rows)
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(workers + 1)
    with Supervisor(settings.state_dir / "log", grace=settings.stop_grace) as supervisor:
        supervisor.start(valkey_child(settings))
        ledger, stores = Ledger(connect(settings.ledger_url)), Stores(settings)
        tokens = Tokens(make_app(settings))
        control = Control(ledger, stores, tokens, settings)
        processes = [context.Process(target=_serve, args=(settings, ready), daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        watch = _Stopwatch(rows)
        with watch.stage("submit"):
            spec = prepare(
                str(source),
                model=_MODEL,
                stores=stores,
                settings=settings,
                rows=RecordRows(prompt_column="prompt"),
                sampling=Sampling(max_tokens=_ANSWER_LIMIT),
            )
            enter(spec, ledger, stores, tokens)
        with watch.stage("plan"):
            control.plan(spec.id)
        try:
            # Interpreters that start are not what is measured.
            ready.wait(_START_S)
        except BrokenBarrierError as error:
            raise JobFailed("A worker process did not start.") from error
        with watch.stage("run"):
            _await_end(spec, ledger, processes)
        with watch.stage("assemble"):
            control.assemble(spec.id)
        _check(spec, rows, ledger)
        for process in processes:
            process.join()
    return JobsBench(rows, source.stat().st_size, workers, settings.storage_url, tuple(watch.stages), _peak_bytes())


def _write_input(path: Path, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for row in range(rows):
            file.write(dumps({"id": row, "prompt": f"{row}: {_TEXT}"}) + b"\n")


def _await_end(spec: JobSpec, ledger: Ledger, processes: Sequence[BaseProcess]) -> None:
    while ledger.state(spec.id) == "in_progress":
        if not any(process.is_alive() for process in processes):
            raise JobFailed("The worker processes have ended before the job.")
        time.sleep(_POLL_S)


def _serve(settings: Settings, ready: Barrier) -> None:
    """A worker's process: slots, heartbeat and host as in `pagemill worker`."""
    config = EngineConfig(_MODEL, max_num_seqs=_ROWS_IN_A_STEP)
    host = EngineHost(config, cast(type[EngineProcess], StubEngine))
    info = host.start()
    slots = slots_for(_ROWS_IN_A_STEP)
    ledger = Ledger(connect(settings.ledger_url))
    context = slot_context(settings, ledger, Tokens(make_app(settings)), host, info, _MODEL, slots)
    context.heartbeat.start()
    threads = [threading.Thread(target=work, args=(_MODEL, context)) for _ in range(slots)]
    ready.wait(_START_S)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    context.heartbeat.stop()
    host.stop()


def _check(spec: JobSpec, rows: int, ledger: Ledger) -> None:
    view = ledger.view(spec.id)
    if (view.state, view.done) != ("completed", rows):
        raise JobFailed(f"The job is {view.state} with {view.done} of {rows} rows: {view.reason or view.errors}")


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in whose) * unit
