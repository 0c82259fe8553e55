"""The job plane without a model: how many rows a second go from submit to manifest on this machine.

Valkey, the store, the ledger, slots, files and pipes are real; workers are processes of their own, and so are their
engines, which are stubs. Celery is left out: it carries a token a slot, and no rows.
"""

import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from types import TracebackType
from typing import Any, Self

import psutil

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
from workers.app import SHARDS_OF_A_SLOT, settle_in, slot_context, slots_for
from workers.host import EngineHost
from workers.slot import work
from workers.stub_engine import StubProcess

_MODEL = "stub"
_ROWS_IN_A_STEP = 256
_ANSWER_LIMIT = 16
_START_S, _POLL_S = 120, 0.2
_TEXT = "How many of the seven books on the second shelf would be left if Ada took every other one of them home? " * 2


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the way: what it took by the clock, and of whose CPU time, in seconds.

    On a machine that others use as well, the CPU time tells more than the clock.
    """

    name: str
    seconds: float
    rows_per_second: float
    cpu: dict[str, float]


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
        cpu = {name: sum(stage.cpu[name] for stage in self.stages) for name in self.stages[0].cpu}
        return Stage("submit to manifest", seconds, self.rows / seconds, cpu)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": asdict(self.total)}


class _Stopwatch:
    """Times stages; `processes` are those whose CPU time is told, by name."""

    def __init__(self, rows: int, processes: Mapping[str, Sequence[psutil.Process]]) -> None:
        self._rows = rows
        self._processes = processes
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began, before = time.monotonic(), self._cpu()
        yield
        seconds, after = time.monotonic() - began, self._cpu()
        cpu = {name: after[name] - before[name] for name in after}
        self.stages.append(Stage(name, seconds, self._rows / seconds, cpu))

    def _cpu(self) -> dict[str, float]:
        return {name: sum(map(_cpu_seconds, processes)) for name, processes in self._processes.items()}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def bench_jobs(rows: int, workers: int, settings: Settings, servers: Mapping[str, int] | None = None) -> JobsBench:
    """Run a job of so many rows in `settings.state_dir`, with a Valkey of its own, and remove what it put in storage.

    `servers` are processes, by name and id, whose CPU time counts too. Raises JobFailed if rows are lost.
    """
    source = settings.state_dir / "input.jsonl"
    _write_input(source, rows)
    with Supervisor(settings.state_dir / "log", grace=settings.stop_grace) as supervisor:
        supervisor.start(valkey_child(settings))
        with Crew(workers, settings, EngineConfig(_MODEL, max_num_seqs=_ROWS_IN_A_STEP), StubProcess) as crew:
            watch = _Stopwatch(
                rows,
                {
                    "bench": [psutil.Process()],
                    "workers": crew.processes,
                    "engines": [engine for process in crew.processes for engine in process.children()],
                    "valkey": [psutil.Process(supervisor.pid("valkey"))],
                    **{name: [psutil.Process(pid)] for name, pid in (servers or {}).items()},
                },
            )
            _run(source, rows, settings, crew, watch)
    return JobsBench(rows, source.stat().st_size, workers, settings.storage_url, tuple(watch.stages), _peak_bytes())


def _run(source: Path, rows: int, settings: Settings, crew: "Crew", watch: _Stopwatch) -> None:
    ledger, stores = Ledger(connect(settings.ledger_url)), Stores(settings)
    tokens = Tokens(make_app(settings))
    control = Control(ledger, stores, tokens, settings)
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
    with watch.stage("run"):
        crew.work()
    with watch.stage("assemble"):
        control.assemble(spec.id)
    _check(spec, rows, ledger)
    stores.delete(info.url for info in stores.list(f"{spec.layout.root}/"))


class Crew:
    """Worker processes in which an interpreter and an engine have started, which is not what is measured.

    They stay until the end of the block, so that their CPU time can be read.
    """

    def __init__(self, count: int, settings: Settings, engine: EngineConfig, process: type[EngineProcess]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, self._go, self._leave = context.Barrier(count + 1), context.Event(), context.Event()
        self._idle = [context.Event() for _ in range(count)]
        self._processes = [
            context.Process(
                target=_serve, args=(settings, engine, process, self._ready, self._go, idle, self._leave), daemon=True
            )
            for idle in self._idle
        ]

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self._processes]

    def work(self) -> None:
        """Let them work until no shard is ready. Raises JobFailed if one ends before."""
        self._go.set()
        for process, idle in zip(self._processes, self._idle, strict=True):
            while not idle.wait(_POLL_S):
                if not process.is_alive():
                    raise JobFailed("A worker process has ended before the job.")

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        try:
            self._ready.wait(_START_S)
        except BrokenBarrierError as error:
            raise JobFailed("A worker process did not start.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        for process in self._processes:
            process.join()


def _write_input(path: Path, rows: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for row in range(rows):
            file.write(dumps({"id": row, "prompt": f"{row}: {_TEXT}"}) + b"\n")


def _serve(
    settings: Settings,
    engine: EngineConfig,
    process: type[EngineProcess],
    ready: Barrier,
    go: Event,
    idle: Event,
    leave: Event,
) -> None:
    """A worker's process: slots, heartbeat and host as in `pagemill worker`."""
    host = EngineHost(engine, process)
    info = host.start()
    slots = slots_for(info.max_num_seqs)
    ledger = Ledger(connect(settings.ledger_url))
    context = slot_context(
        settings, ledger, Tokens(make_app(settings)), host, info, engine.model, slots, SHARDS_OF_A_SLOT
    )
    context.heartbeat.start()
    settle_in()
    ready.wait(_START_S)
    go.wait()
    with ThreadPoolExecutor(slots) as pool:
        for slot in [pool.submit(work, engine.model, context) for _ in range(slots)]:
            slot.result()
    idle.set()
    leave.wait()
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
