"""The fleet of a soak: processes that are started again when they end, a stream of jobs, and what became of them."""

import random
import re
import signal
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

from jobs import orders
from jobs.control import Control
from jobs.errors import EXIT_UNREACHABLE
from jobs.failpoints import POINTS
from jobs.recover import Unusable, lost_jobs, recover
from jobs.spec import JobSpec, Terms
from jobs.submit import enter
from tests.proxy import TcpProxy
from tests.system.checker import check
from tests.system.fleet import LEASE_TTL, Fleet, Job, Process
from tests.system.history import History
from tests.system.stub_engine import POISON, REFUSED

CONTROLS, WORKERS = 2, 3
JOBS_AT_ONCE = 5
ROWS = (1, 3, 8, 24, 24, 60, 150)
PATIENCE_S = 180
"""What a job may take from its submit to its end, faults and all."""
MAX_TRIES = 1000
"""Shards are tried far more often than anywhere else, and none may be given up."""
_LOOK_S = 0.1
_FAULTS_KEPT = 30
_MAY_END_WITH = {0, -signal.SIGKILL, -signal.SIGTERM, 70, EXIT_UNREACHABLE}
"""Asked to stop; killed; asked to stop before it could hear that; not done in time with what a stop asks for, as where
the ledger does not answer; begun where the ledger does not answer."""

_FAILPOINT = re.compile(r"failpoint (\S+: \w+)$", re.MULTILINE)
_CONTROL_POINTS = sorted(point for point in POINTS if point.startswith(("plan.", "job.")))
_WORKER_POINTS = sorted(point for point in POINTS if point.startswith(("lease.", "row.", "segment.", "shard.")))
_RAISING_POINTS = {*_CONTROL_POINTS, "segment.begun", "segment.put"}
"""Where a service may be out of reach."""


@dataclass
class Seat:
    """A place in the fleet, and the process that has it now."""

    kind: str
    process: Process
    wakes_at: float | None = None
    """When a process that is stopped goes on."""


@dataclass(frozen=True)
class Running:
    """A job that has not been seen to end."""

    job: Job
    errors: dict[int, str]
    submitted_at: float

    @property
    def is_poisoned(self) -> bool:
        return "engine_error" in self.errors.values()


@dataclass(frozen=True)
class Ended:
    job: Job
    errors: dict[int, str]
    state: str
    took_s: float


class SoakedMill:
    """Not thread-safe: whoever injects faults lets `rest` do the housekeeping meanwhile."""

    def __init__(self, fleet: Fleet, proxies: dict[str, TcpProxy], rng: random.Random) -> None:
        self.fleet = fleet
        self.proxies = proxies
        self.rng = rng
        self.history = History(fleet.valkey.data_dir)
        self.running: list[Running] = []
        self.ended: list[Ended] = []
        self.paused: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.exit_codes: Counter[str] = Counter()
        self.last_faults: deque[str] = deque(maxlen=_FAULTS_KEPT)
        self.engine_died_at = 0.0
        self.spared = False
        """No more failpoints: it comes to its end."""
        self._began_at = time.monotonic()
        self._clock = threading.Event()
        self.seats = [self._new_seat(kind) for kind in ["control"] * CONTROLS + ["worker"] * WORKERS]

    @property
    def has_poison(self) -> bool:
        return any(running.is_poisoned for running in self.running)

    def note(self, kind: str, what: str = "") -> None:
        """A fault was injected."""
        self.faults[kind] += 1
        self._remember(f"{kind} {what}")

    def failpoints(self) -> Counter[str]:
        """Those that fired, by point and action."""
        logs = (process.log.read_text() for process in self.fleet.processes)
        return Counter(found for log in logs for found in _FAILPOINT.findall(log))

    def _remember(self, what: str) -> None:
        self.last_faults.append(f"{time.monotonic() - self._began_at:7.1f} s  {what}".rstrip())

    # --- processes ----------------------------------------------------------------------------------------------

    def rest(self, seconds: float) -> None:
        """Let the fleet work for so long, and put a new process in each seat whose process has ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._clock.wait(min(left, _LOOK_S))
            for seat in self.seats:
                self._tend(seat)

    def freeze(self, seat: Seat) -> None:
        seat.process.send(signal.SIGSTOP)
        seat.wakes_at = time.monotonic() + self.rng.uniform(0.2, 3) * LEASE_TTL

    def _tend(self, seat: Seat) -> None:
        if not seat.process.alive:
            self._bury(seat.process)
            fresh = self._new_seat(seat.kind)
            seat.process, seat.wakes_at = fresh.process, None
        elif seat.wakes_at is not None:
            if time.monotonic() >= seat.wakes_at:
                seat.process.send(signal.SIGCONT)
                seat.wakes_at = None
        elif seat.process.stopped:
            self._remember(f"{seat.process.name} frozen by a failpoint")
            self.freeze(seat)

    def _bury(self, process: Process) -> None:
        code, log = process.wait_for_death(), process.log.read_text()
        self._remember(f"{process.name} ended with {code}, after the failpoints {_FAILPOINT.findall(log)}")
        self.exit_codes[str(code)] += 1
        assert code in _MAY_END_WITH, f"{process.name} ended with {code}:\n{log[-5000:]}"

    def _new_seat(self, kind: str) -> Seat:
        if kind == "control":
            return Seat(kind, self.fleet.control(self._failpoints(_CONTROL_POINTS)))
        step_s = self.rng.choice([0.0, 0.05, 0.3])
        slots = self.rng.choice([1, 2, 4, None])
        return Seat(kind, self.fleet.worker(self._failpoints(_WORKER_POINTS), step_s=step_s, slots=slots))

    def _failpoints(self, points: list[str]) -> str:
        if self.spared or self.rng.random() < 0.2:
            return ""
        point = self.rng.choice(points)
        action = self.rng.choice(["kill", "stop", "raise"] if point in _RAISING_POINTS else ["kill", "stop"])
        return f"{point}:{action}@{self.rng.randint(1, 6)}"

    # --- jobs ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        """One more job, unless there are many."""
        if len(self.running) >= JOBS_AT_ONCE:
            return
        number, rng = len(self.running) + len(self.ended), self.rng
        prompts = [f"question {number}/{n}" for n in range(rng.choice(ROWS))]
        errors: dict[int, str] = {}
        for word, code, share in ((REFUSED, "refused_by_stub", 0.3), (POISON, "engine_error", 0.1)):
            if rng.random() < share:
                index = rng.randrange(len(prompts))
                prompts[index] = f"{word} {number}/{index}"
                errors[index] = code
        expires_at = int(time.time()) + rng.randint(2, 20) if rng.random() < 0.1 else None
        terms = Terms(tenant=rng.choice(["a", "b"]), priority=rng.randint(-2, 2), expires_at=expires_at)
        fleet = self.fleet
        if rng.random() < 0.2:
            self.note("submit died")
            lost = self._prepared(number, prompts, terms)
            fleet.stores.put(lost.layout.spec, lost.model_dump_json().encode())
        for _ in range(rng.choice([1, 1, 1, 2])):
            spec = enter(self._prepared(number, prompts, terms), fleet.ledger, fleet.stores, fleet.tokens)
        self.running.append(Running(Job(spec, prompts), errors, time.monotonic()))

    def _prepared(self, number: int, prompts: list[str], terms: Terms) -> JobSpec:
        """The same job for the same number, however often it is submitted."""
        spec = self.fleet.prepare(prompts=prompts, terms=terms, idempotency_key=f"soak-{number}").spec
        return spec.model_copy(update={"max_tries": MAX_TRIES})

    def look_after_jobs(self) -> None:
        """Recover those that the ledger has lost, resume those that are paused, and check those that have ended."""
        self._recover()
        for job_id in self.paused:
            orders.resume(job_id, self.fleet.ledger, self.fleet.stores)
        self.paused.clear()
        for running in list(self.running):
            view = self.fleet.view(running.job)
            took_s = time.monotonic() - running.submitted_at
            if view.terminal:
                self.running.remove(running)
                self.ended.append(Ended(running.job, running.errors, view.state, took_s))
                self.check(self.ended[-1])
            else:
                assert took_s < PATIENCE_S, f"{running.job.id} has not ended after {took_s:.0f} s: {view}"

    def check(self, ended: Ended) -> None:
        """Raises AssertionError with the job's id."""
        self.fleet.valkey.wait_until_written()
        try:
            self.history.read_on()
            assert ended.state in ("completed", "cancelled", "expired"), f"it has {ended.state}"
            job, stores = ended.job, self.fleet.stores
            check(job.spec, job.prompts, stores, self.history, ending=ended.state, errors=ended.errors)
        except Exception as error:
            error.add_note(f"This was found in the job {ended.job.id}, which is {ended.state}.")
            raise

    def _recover(self) -> None:
        fleet = self.fleet
        control = Control(fleet.ledger, fleet.stores, fleet.tokens, fleet.settings)
        for spec in lost_jobs(fleet.settings.storage_url, fleet.ledger, fleet.stores):
            assert not isinstance(spec, Unusable), spec
            recover(spec, fleet.ledger, fleet.stores, fleet.tokens, control)
