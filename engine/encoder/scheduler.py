"""Which prompts an encoder reads in the next step: whole ones, first come, first served; no blocks, no chunks."""

from itertools import islice

from engine.errors import RequestError
from engine.info import EngineStats
from engine.plan import PlanRow, StepOutput, StepPlan
from engine.request import Request


class EncoderScheduler:
    """Owns the requests. `schedule` changes nothing: a request leaves the queue when a step that read it is committed.

    Deterministic: no clock, no randomness.

    Args:
        max_num_seqs: Row budget: most prompts in one step.
        max_num_batched_tokens: Token budget: most tokens in one step.
        max_length: The longest prompt that is taken.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_length: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_length = max_length
        self._waiting: dict[int, Request] = {}  # by index, in order of arrival
        self._prompt_tokens = self._steps = self._step_rows = self._tail_steps = self._tail_step_rows = 0

    def add(self, request: Request) -> None:
        """Queue a request that pools.

        Raises `RequestError` (code `context_length_exceeded`) if its prompt is too long.
        """
        if request.num_prompt_tokens > self._max_length:
            raise RequestError(
                f"The prompt has {request.num_prompt_tokens} tokens, and the model takes {self._max_length}.",
                code="context_length_exceeded",
                field="prompt",
                hint="Shorten it, or let truncate_prompt_tokens cut it (-1: to what the model takes).",
            )
        if request.index in self._waiting:
            raise ValueError(f"a request with index {request.index} is in the engine already")
        self._waiting[request.index] = request

    def abort(self, index: int) -> Request | None:
        """Finish a request now, and return it; None if there is none of that index."""
        request = self._waiting.pop(index, None)
        if request:
            request.abort()
        return request

    def fail(self, request: Request, error: RequestError) -> None:
        """Finish a request with an error, outside of any step."""
        request.fail(error)
        del self._waiting[request.index]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_wanted(self) -> int:
        """How many more requests it should know of to fill a step; below 0: none."""
        return self._max_num_seqs - len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """Plan the next step within `token_budget`, by default `max_num_batched_tokens`; empty if nothing waits.

        The oldest request is part of it whatever the budget, since nobody can read half of a prompt. Rows stand in
        order of length, since attention runs once for neighbours of equal length.
        """
        budget = self._max_num_batched_tokens if token_budget is None else token_budget
        rows: list[PlanRow] = []
        for request in islice(self._waiting.values(), self._max_num_seqs):
            length = request.num_prompt_tokens
            if rows and length > budget:
                break
            rows.append(PlanRow(request.sequences[0], 0, length, num_samples=0))
            budget -= length
        rows.sort(key=lambda row: row.num_tokens)
        started = tuple(row.sequence.request.index for row in rows)
        return StepPlan(tuple(rows), sum(row.num_tokens for row in rows), started=started)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Enter the results of a step, and return its requests, all of which it finished."""
        if len(plan.rows) == len(self._waiting):
            self._tail_steps += 1
            self._tail_step_rows += len(plan.rows)
        finished = []
        for index, row in enumerate(plan.rows):
            request = row.sequence.request
            assert request.pooler is not None
            request.pooler.add(output.pooled[index])
            row.sequence.num_computed_tokens = row.num_tokens
            row.sequence.finish("stop")
            del self._waiting[request.index]
            finished.append(request)
        self._prompt_tokens += plan.num_tokens
        self._steps += 1
        self._step_rows += len(plan.rows)
        return finished

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self._waiting),
            prompt_tokens=self._prompt_tokens,
            steps=self._steps,
            step_rows=self._step_rows,
            tail_steps=self._tail_steps,
            tail_step_rows=self._tail_step_rows,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if a request that has ended is still queued; for tests, between two steps."""
        if any(request.finished for request in self._waiting.values()):
            raise RuntimeError("encoder scheduler: a finished request is still waiting")
