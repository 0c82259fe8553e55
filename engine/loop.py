"""The loop: plan a step, run it, enter its results. Two ways of it, which give the same tokens.

plain       schedule ─► execute ─► commit          the device waits while the host commits and plans

overlapped  schedule ─► launch i+1 ─► collect i ─► commit i ─► sample i+1
            what follows the tokens of step i is planned and launched before they are on the host; only the
            sampling of i+1 comes after they were committed, for it may depend on them: grammars, penalties
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from engine.errors import OutOfMemory, RequestError
from engine.plan import BlockMove, StepOutput, StepPlan
from engine.request import Request
from engine.runner import StepInFlight


class StepRunner(Protocol):
    """What the plain loop needs of `engine.runner.Runner`, or of `engine.encoder.runner.EncoderRunner`."""

    def move_blocks(self, moves: Iterable[BlockMove]) -> None: ...

    def execute(self, plan: StepPlan) -> StepOutput: ...


class AsyncRunner(Protocol):
    """What the overlapped loop needs of `engine.runner.Runner`."""

    def move_blocks(self, moves: Iterable[BlockMove]) -> None: ...

    def launch(self, plan: StepPlan) -> StepInFlight: ...

    def sample(self, step: StepInFlight) -> None: ...

    def collect(self, step: StepInFlight) -> StepOutput: ...


class StepScheduler(Protocol):
    """What the plain loop needs of `engine.scheduler.Scheduler`, or of `engine.encoder.scheduler.EncoderScheduler`."""

    def schedule(self, token_budget: int | None = None) -> StepPlan: ...

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Request]: ...

    def fail(self, request: Request, error: RequestError) -> None: ...


class AsyncScheduler(StepScheduler, Protocol):
    """What the overlapped loop needs of `engine.scheduler.Scheduler`."""

    def begin(self, plan: StepPlan) -> None: ...

    def cancel(self, plan: StepPlan) -> None: ...


class StepLoop(Protocol):
    @property
    def in_flight(self) -> bool:
        """Whether a step is on the device whose results are not entered yet."""
        ...

    def step(self, on_start: Callable[[tuple[int, ...]], None]) -> list[Request] | None:
        """Go on by one step, and return the requests that ended; None if there is nothing to run.

        `on_start` is called before requests run for the first time, with their indices.
        """
        ...


class PlainLoop:
    """One step after the other. `max_num_batched_tokens` is the budget of a step that fits the memory."""

    in_flight = False

    def __init__(self, scheduler: StepScheduler, runner: StepRunner, max_num_batched_tokens: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._budget = TokenBudget(max_num_batched_tokens)

    def step(self, on_start: Callable[[tuple[int, ...]], None]) -> list[Request] | None:
        """See `StepLoop`."""
        plan = self._scheduler.schedule(self._budget.tokens)
        # Apart from the step itself, which may be given up and planned anew: the moves are not planned twice.
        self._runner.move_blocks(plan.moves)
        if not plan.rows:
            return None
        if plan.started:
            on_start(plan.started)
        try:
            output = self._runner.execute(plan)
        except OutOfMemory as error:
            return give_way(self._scheduler, self._budget, plan, error)
        self._budget.record_success()
        return self._scheduler.commit(plan, output)


class OverlappedLoop:
    """A step is launched while the one before it runs. See `PlainLoop` for `max_num_batched_tokens`."""

    def __init__(self, scheduler: AsyncScheduler, runner: AsyncRunner, max_num_batched_tokens: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._budget = TokenBudget(max_num_batched_tokens)
        self._in_flight: StepInFlight | None = None

    @property
    def in_flight(self) -> bool:
        """See `StepLoop`."""
        return self._in_flight is not None

    def step(self, on_start: Callable[[tuple[int, ...]], None]) -> list[Request] | None:
        """See `StepLoop`. The requests that ended did so in the step that was launched by the call before."""
        plan = self._scheduler.schedule(self._budget.tokens)
        self._runner.move_blocks(plan.moves)
        if not plan.rows:
            return self._retire() if self._in_flight else None
        if plan.started:
            on_start(plan.started)
        try:
            step = self._runner.launch(plan)
        except OutOfMemory as error:
            return self._retire() + give_way(self._scheduler, self._budget, plan, error)
        self._scheduler.begin(plan)
        finished = self._retire()
        try:
            self._runner.sample(step)
        except OutOfMemory as error:
            self._scheduler.cancel(plan)
            return finished + give_way(self._scheduler, self._budget, plan, error)
        self._budget.record_success()
        self._in_flight = step
        return finished

    def _retire(self) -> list[Request]:
        """Wait for the step on the device, if there is one, and enter its results."""
        step, self._in_flight = self._in_flight, None
        return self._scheduler.commit(step.plan, self._runner.collect(step)) if step else []


def give_way(scheduler: StepScheduler, budget: "TokenBudget", plan: StepPlan, error: OutOfMemory) -> list[Request]:
    """After a step that did not fit: try again with less, and when that has not helped, without the largest request.

    Returns that one, if it has not ended meanwhile.
    """
    if budget.reduce(plan.num_tokens):
        return []
    largest = max(plan.rows, key=lambda row: row.start + row.num_tokens).sequence.request
    if largest.finished:
        return []
    scheduler.fail(largest, RequestError(error.message, code=error.code))
    return [largest]


class TokenBudget:
    """The tokens of one step, less for a while after the device ran out of memory.

    Halved at once when a step does not fit, doubled again after 64 steps that did. Three steps in a row that do not
    fit are not the budget's fault.
    """

    _PATIENCE = 2
    _STEPS_TO_RECOVER = 64

    def __init__(self, full: int) -> None:
        self._full = full
        self.tokens = full
        self._failures = 0
        self._successes = 0

    def reduce(self, num_tokens: int) -> bool:
        """Ask for less than the `num_tokens` that did not fit; False, and a new start, if that would not help."""
        self._successes = 0
        if num_tokens == 1 or self._failures == self._PATIENCE:
            self._failures = 0
            return False
        self._failures += 1
        self.tokens = num_tokens // 2
        return True

    def record_success(self) -> None:
        self._failures = 0
        self._successes += 1
        if self._successes == self._STEPS_TO_RECOVER:
            self._successes = 0
            self.tokens = min(self._full, 2 * self.tokens)
