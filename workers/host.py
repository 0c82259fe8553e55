"""The engine process and its keeper: it is restarted when it dies, and what was in flight is asked again.

    rows ── submit ─► calls ─► engine process ──► answers, a step's at a time
                       ▲             │ dies
                       └── replayed ─┘     a call that was in flight at two deaths is a suspect

    suspects ──► group of them, with nobody beside it ──► answers: they were innocent
                   ▲                                 │ dies
                   └── split into four groups ───────┘     one that stood alone has found its error

A fault of the machine kills calls that would do no harm, so a death with several in flight accuses nobody. To find the
one that does harm among n suspects costs two deaths to suspect them, and ceil(log4(n)) more, or one if it is the only
suspect; to find p of them costs two, and p times that at most.
"""

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from engine.config import EngineConfig
from engine.errors import EngineDied, EngineError, RequestError
from engine.info import EngineInfo, EngineStats
from engine.messages import NewRequest
from engine.outputs import EngineOutput
from engine.process import EngineProcess
from workers.render import EngineRequest

log = logging.getLogger(__name__)

_SUSPECT_AFTER_DEATHS = 2
# One among n is found after log_k(n) * (restart + k/2 * generation) seconds: half of the groups of a split run through
# before the one that dies. With restarts of 5 to 60 s and generations of 20 s, 4 is the best k or within a tenth of it.
_SPLIT_INTO = 4
_HOPELESS_AFTER = 4
_RESTART_DELAY_S, _MAX_RESTART_DELAY_S = 0.5, 30.0
_STOP_POLL_S = 0.05
_ROWS_PER_SEAT = 2


@dataclass(eq=False, slots=True)
class Call:
    """One request, for as long as it takes to be answered, over as many engine processes as that needs.

    `on_answers` is given the call, with others that were answered at the same time, once `answer` is there. `began_at`
    is when the engine that has it now began with it, by the monotonic clock; None while it waits for its turn. `index`
    is the engine's number for it, None while no engine has it.
    """

    request: EngineRequest
    on_answers: "OnAnswers"
    answer: EngineOutput | RequestError | EngineDied | None = None
    deaths: int = 0
    began_at: float | None = None
    index: int | None = None
    aborted: bool = False


OnAnswers = Callable[[list[Call]], None]
"""Called from a thread of the host or of the engine process's owner; must not block."""
MakeEngine = Callable[
    [EngineConfig, Callable[[list[EngineOutput]], None], Callable[[tuple[int, ...]], None]], EngineProcess
]


class EngineHost:
    """Owns the engine of this worker. All methods may be called from any thread.

    `on_hopeless` is called when the engine could not be started again several times in a row: the worker had better
    end, and give its shards to others, than hold them for an engine that does not come.

    The keeper thread alone starts engines; the lock guards the sets of calls.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_engine: MakeEngine = EngineProcess,
        *,
        on_hopeless: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._on_hopeless = on_hopeless
        self._engine = make_engine(config, self._answered, self._began)
        self._info: EngineInfo | None = None
        self._lock = threading.Lock()
        self._up = False
        self._indices = count()
        self._in_flight: dict[int, Call] = {}
        self._held: deque[Call] = deque()
        self._groups: deque[list[Call]] = deque()
        self._on_trial: set[Call] = set()
        self._room = threading.Condition()
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="engine-keeper", daemon=True)
        self.restarts = 0

    def start(self) -> EngineInfo:
        """Start the engine, and return when it can answer. Raises the engine's own error if the model does not load."""
        self._info = self._engine.start()
        self._up = True
        self._keeper.start()
        return self._info

    def submit(self, requests: Iterable[EngineRequest], on_answers: OnAnswers) -> list[Call]:
        """Ask the engine, and return a call for each request. Each is answered once, whatever happens to engine
        processes meanwhile: with EngineDied only if the host is stopped first.
        """
        calls = [Call(request, on_answers) for request in requests]
        with self._lock:
            self._held.extend(calls)
            self._dispatch()
        return calls

    def abort(self, calls: list[Call]) -> None:
        """Give up on calls: nobody waits for their answers any more."""
        with self._lock:
            for call in calls:
                call.aborted = True
            self._held = deque(call for call in self._held if not call.aborted)
            left = ([call for call in group if not call.aborted] for group in self._groups)
            self._groups = deque(group for group in left if group)
            indices = [call.index for call in calls if call.index is not None]
        if indices:
            self._engine.abort(indices)

    @property
    def has_room(self) -> bool:
        """Whether so few rows are in the engine that it might soon have none that waits for a seat."""
        return len(self._in_flight) + len(self._held) < _ROWS_PER_SEAT * self.seats

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for a condition that is looked at when calls are answered and there is room for more, and when woken."""
        with self._room:
            self._room.wait_for(until)

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._room:
            self._room.notify_all()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def seats(self) -> int:
        """How many sequences a step has at most; 0 before the engine has said it."""
        return self._info.max_num_seqs if self._info else 0

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid

    def stop(self, timeout_s: float = 3) -> None:
        """End the engine; calls that are open are answered with EngineDied."""
        self._stopping.set()
        self._engine.stop(timeout_s)
        while self._keeper.is_alive():
            # It may have been starting the next engine, which has to be ended as well.
            self._keeper.join(_STOP_POLL_S)
            self._engine.stop(0)
        with self._lock:
            orphans = [*self._held, *(call for group in self._groups for call in group)]
            orphans += self._in_flight.values()
            self._held.clear()
            self._groups.clear()
            self._in_flight.clear()
        for call in orphans:
            call.answer = EngineDied("The worker stops its engine.")
        _report(orphans)

    def _dispatch(self) -> None:
        """Send what may be sent now. The caller holds the lock."""
        # A group on trial runs with nobody beside it, so that its guilt or innocence is plain.
        if not self._up or self._on_trial:
            return
        if self._groups:
            group = self._groups.popleft()
            self._on_trial = set(group)
            self._send(group)
        elif self._held:
            self._send(self._held)
            self._held.clear()

    def _send(self, calls: Iterable[Call]) -> None:
        requests = []
        for call in calls:
            call.index = next(self._indices)
            self._in_flight[call.index] = call
            asked = call.request
            requests.append(
                NewRequest(
                    call.index,
                    asked.prompt,
                    asked.params,
                    lora=asked.lora,
                    seed=asked.seed,
                    priority=asked.priority,
                    group=asked.group,
                )
            )
        self._engine.submit(requests)

    def _began(self, indices: tuple[int, ...]) -> None:
        """What the engine begins with in its next step, on the thread that reads from it."""
        now = time.monotonic()
        with self._lock:
            for index in indices:
                if call := self._in_flight.get(index):
                    call.began_at = now

    def _answered(self, outputs: list[EngineOutput]) -> None:
        """What one step of the engine finished, on the thread that reads from it."""
        with self._lock:
            calls = [self._in_flight.pop(output.index) for output in outputs]
            for call, output in zip(calls, outputs, strict=True):
                call.index, call.answer = None, output
            self._on_trial.difference_update(calls)
            self._dispatch()
        _report(calls)
        if self.has_room:
            self.wake()

    def _keep(self) -> None:
        """The keeper thread: waits for a death, sorts out who may have caused it, starts the next engine."""
        delay = _RESTART_DELAY_S
        while True:
            born = time.monotonic()
            self._engine.died.wait()
            if self._stopping.is_set():
                return
            learned = self._sort_out_victims()
            lived_long = time.monotonic() - born > _MAX_RESTART_DELAY_S
            # What is learned from a death is worth the next one at once: the search is short.
            delay = _RESTART_DELAY_S if learned or lived_long else min(delay * 2, _MAX_RESTART_DELAY_S)
            if not self._restart(delay):
                return

    def _sort_out_victims(self) -> bool:
        """Put what was in flight in line again. Whether the death told more of who causes them."""
        with self._lock:
            self._up = False
            victims = [call for call in self._in_flight.values() if not call.aborted]
            # An aborted call that the engine had not yet let go of may have been the one.
            alone = bool(self._on_trial) and len(self._in_flight) == 1
            self._in_flight.clear()
            self._on_trial.clear()
            for call in victims:
                call.deaths += 1
                call.began_at = call.index = None
            guilty = victims[0] if alone and victims else None
            suspects = [c for c in victims if c is not guilty and c.deaths >= _SUSPECT_AFTER_DEATHS]
            self._groups.extendleft(reversed(list(_split(suspects))))
            self._held.extendleft(c for c in reversed(victims) if c.deaths < _SUSPECT_AFTER_DEATHS)
        log.error("%s It had %d request(s) in flight; starting it again", self._engine.death, len(victims))
        if guilty is not None:
            guilty.answer = RequestError(
                "The engine died each time it ran this request, the last time alone.", code="engine_error"
            )
            _report([guilty])
        return guilty is not None or bool(suspects)

    def _restart(self, delay: float) -> bool:
        failures = 0
        while not self._stopping.wait(delay):
            self._engine = self._make_engine(self._config, self._answered, self._began)
            try:
                self._engine.start()
            except EngineError as error:
                log.error("the engine does not start again: %s", error)
                delay = min(delay * 2, _MAX_RESTART_DELAY_S)
                failures += 1
                if failures == _HOPELESS_AFTER:
                    self._on_hopeless()
                continue
            self.restarts += 1
            with self._lock:
                self._up = True
                self._dispatch()
            return True
        return False


def _split(suspects: list[Call]) -> Iterator[list[Call]]:
    """At most `_SPLIT_INTO` groups, of sizes as equal as they can be."""
    for part in range(_SPLIT_INTO):
        first, last = (math.ceil(len(suspects) * n / _SPLIT_INTO) for n in (part, part + 1))
        if first < last:
            yield suspects[first:last]


def _report(calls: Iterable[Call]) -> None:
    """Give each caller those of the calls that are its own."""
    by_caller: defaultdict[OnAnswers, list[Call]] = defaultdict(list)
    for call in calls:
        by_caller[call.on_answers].append(call)
    for on_answers, its_calls in by_caller.items():
        on_answers(its_calls)
