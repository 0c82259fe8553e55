"""Who runs in the next step, with how many tokens and in which blocks.

A step, and what happens if it stops between two of its verbs:

    schedule()            execute(plan)             commit(plan, output)
    ├ running requests    ├ forward: KV into the    ├ num_computed_tokens advances
    │   grow, or preempt  │   blocks of the plan    ├ full blocks become findable
    ├ waiting requests    └ sample                  ├ continuations are forked off
    │   are admitted                                ├ sampled tokens are appended
    └ blocks are reserved                           └ finished requests give back their blocks

`schedule` moves requests between the queues and reserves blocks, and nothing else: a plan that is never committed (the
device was out of memory) leaves every request with the tokens it had, and scheduling again is all there is to do.

A step may be planned while the one before it is on the device:

    schedule() ─► launch i ─► begin(i) ─► schedule() ─► launch i+1 ─► begin(i+1) ─► commit(i) ─► schedule() ─► ...

After `begin`, `schedule` plans as if the step had been committed. A placeholder stands for each token that is not known
yet; the runner finds it on the device. What depends on more than one token being drawn is not planned ahead: the ends
of prompts that fork, and beams. Nor is anybody preempted: where that would be needed, the plan is empty, and what is on
the device comes first. Until a step is committed or cancelled its rows keep their blocks, also those that have
finished meanwhile; their results are dropped.

Its moves alone are not planned again: after every call of `schedule`, and before the next, they have to be carried out,
whatever becomes of the rows. `engine.block_tables` says what depends on it.
"""

from collections import deque
from collections.abc import MutableSequence
from itertools import islice

from engine.admission import OutputForecast
from engine.block_tables import BlockTables
from engine.config import SchedulerConfig
from engine.errors import RequestError, not_numbers
from engine.in_flight import StepsInFlight
from engine.info import EngineStats
from engine.lora import LoraCache
from engine.plan import PlanDraft, PlanRow, Sampled, StepOutput, StepPlan
from engine.request import Request
from engine.sampling.beam import BeamSearch
from engine.sequence import Sequence, SequenceStatus
from engine.waiting import ArrivalOrder, PrefixOrder, WaitingRequests


class Scheduler:
    """Owns the requests, their sequences and, through the block pool, their blocks.

    Deterministic: no clock, no randomness.
    """

    def __init__(self, config: SchedulerConfig, adapters: LoraCache | None = None) -> None:
        self.config = config
        self._adapters = adapters
        self.tables = BlockTables(config)
        self._forecast = OutputForecast(config.block_size)
        self._new = _order(config, self._forecast)
        self._waiting: deque[Sequence] = deque()  # come before new ones: preempted, forked, or passed over
        self._running: list[Sequence] = []  # in order of admission: the youngest stands last
        self._requests: dict[int, Request] = {}
        self._in_flight = StepsInFlight(self.tables)
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._steps = self._step_rows = 0
        self._tail_steps = self._tail_step_rows = self._preemptions = self._swaps = 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises `RequestError` (code `context_length_exceeded`) if its prompt leaves no room for an answer.
        """
        num_answer_tokens = 0 if request.pooler else 1
        longest = self.config.max_model_len - num_answer_tokens
        if request.num_prompt_tokens > longest:
            raise RequestError(
                f"The prompt has {request.num_prompt_tokens} tokens; with {num_answer_tokens} of an answer, at most "
                f"{longest} fit.",
                code="context_length_exceeded",
                field="prompt",
                hint="Shorten the prompt, or raise max_model_len if the model and the KV pool allow it.",
            )
        if request.index in self._requests:
            raise ValueError(f"a request with index {request.index} is in the engine already")
        request.max_tokens = min(request.max_tokens, self.config.max_model_len - request.num_prompt_tokens)
        self._requests[request.index] = request
        self._new.add(request)

    def abort(self, index: int) -> Request | None:
        """Finish a request now, whatever its state, and return it; None if there is none of that index."""
        request = self._requests.get(index)
        if request is None:
            return None
        request.abort()
        self._retire([request])
        return request

    def fail(self, request: Request, error: RequestError) -> None:
        """Finish a request with an error, outside of any step."""
        request.fail(error)
        self._retire([request])

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._new)

    @property
    def num_wanted(self) -> int:
        """How many more requests it should know of, to keep the batch full and to order them; below 0: none."""
        return self._new.num_wanted - len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # The one invariant: in every sequence `num_computed_tokens` chases `num_tokens`, and a step computes some or all
    # of the tokens between the two. There are no phases. A new prompt is far behind, and catches up in chunks; a
    # prefix hit starts it further ahead; one that generates is one token behind, for ever; a preempted one is
    # as far behind as a prompt of all its tokens.
    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """Plan the next step within `token_budget`, by default `max_num_batched_tokens`.

        The plan is empty only if there is no request, or every one of them waits for an adapter to be loaded, or for
        the results of a step that was begun. Running sequences come first; waiting ones are admitted only into a step
        in which nobody was preempted, so that what was freed is not given away at once.
        """
        draft = PlanDraft(self.config.max_num_batched_tokens if token_budget is None else token_budget)
        if not self._in_flight.anticipate():
            return draft.freeze()
        preemptions_before = self._preemptions
        if not self._continue_running(draft):
            draft.drop_rows()
            return draft.freeze()
        if self._preemptions == preemptions_before:
            self._admit(draft)
        # Nobody can go on but for the seats and blocks of parked sequences, which for their part wait for the others.
        while not draft.rows and self._running and not self._in_flight:
            self._preempt(self._running.pop(), draft)
            self._admit(draft)
        return draft.freeze()

    def _continue_running(self, draft: PlanDraft) -> bool:
        """Plan rows of the running sequences; False if one of them would have to be preempted under a launched step."""
        position = 0
        while position < len(self._running) and draft.budget > 0:
            sequence = self._running[position]
            position += 1
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
            if sequence.parked or not num_tokens:
                continue
            if self._in_flight and self.tables.num_missing(sequence, num_tokens) > self.tables.pool.num_free:
                return False
            if not self._grow(sequence, num_tokens, draft):
                break  # it was the youngest, and preempted itself
            draft.add_row(sequence, num_tokens)
        return True

    def _grow(self, sequence: Sequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Reserve blocks for the next tokens, preempting from the youngest on; False if that was `sequence` itself."""
        # A victim may have been the other holder of a shared tail, so what is missing is counted anew.
        while self.tables.num_missing(sequence, num_tokens) > self.tables.pool.num_free:
            victim = self._running.pop()
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        self.tables.extend(sequence, num_tokens, draft.moves)
        return True

    def _preempt(self, victim: Sequence, draft: PlanDraft) -> None:
        if self.tables.swap_out(victim, draft.moves):
            self._swaps += 1
        else:
            victim.num_computed_tokens = 0
            if victim.request.pooler:
                victim.request.pooler.reset()
        self.tables.release(victim)
        victim.status = SequenceStatus.WAITING
        self._waiting.appendleft(victim)
        self._preemptions += 1
        self._forecast.record_preemption()

    def _admit(self, draft: PlanDraft) -> None:
        """Start waiting sequences in order, while seats, tokens and predicted blocks last.

        A sequence takes the seats and blocks of all its continuations. One free seat is enough to start: continuations
        that find none wait at the head of the queue, so that a request may have more of them than there are seats.

        One whose next block is being computed by another row of this same step is passed over: a step later it finds
        that block in the cache. Its seat and the blocks that it will lack are kept for it, lest requests of other
        prefixes take the room of those that share this one. Passed over as well is one that is parked, or whose adapter
        is not in memory. They keep their places at the head of the queue.
        """
        if not self.num_waiting or len(self._running) == self.config.max_num_seqs:
            return
        free_seats = self.config.max_num_seqs - sum(sequence.num_continuations for sequence in self._running)
        in_progress = self._in_flight.filled_blocks() | self.tables.filled_by(draft.rows)
        promised = sum(self._forecast.growth(sequence) for sequence in self._running)
        passed_over: list[Sequence] = []
        while draft.budget > 0 and free_seats > 0 and (sequence := self._next(len(passed_over))):
            if not self._may_start(sequence):
                passed_over.append(sequence)
                continue
            hits, next_hash = self.tables.find_prefix(sequence)
            need = self._forecast.blocks(sequence, min(sequence.num_continuations, free_seats)) - len(hits)
            if soon_cached := next_hash in in_progress:
                need -= self.tables.num_among(sequence, len(hits), in_progress)
            available = self.tables.pool.num_free - self.tables.pool.num_free_among(hits) - promised
            # With nobody running, everything is free: the pool holds any one sequence of max_model_len.
            if need > available and (self._running or self._in_flight.lingering):
                passed_over.append(sequence)
                break
            free_seats -= sequence.num_continuations
            if soon_cached:
                passed_over.append(sequence)
                promised += need
                continue
            row = self._start(sequence, hits, draft)
            in_progress |= self.tables.filled_by([row])
            promised += self._forecast.growth(sequence)
        self._waiting.extendleft(reversed(passed_over))

    def _next(self, num_passed_over: int) -> Sequence | None:
        """Take the next waiting sequence; none if a batch of them was passed over, and all others are new."""
        if self._waiting:
            return self._waiting.popleft()
        if len(self._new) and num_passed_over < self.config.max_num_seqs:
            return self._new.take().sequences[0]
        return None

    def _may_start(self, sequence: Sequence) -> bool:
        return not sequence.parked and (not self._adapters or self._adapters.acquire(sequence.request))

    def _start(self, sequence: Sequence, hits: list[int], draft: PlanDraft) -> PlanRow:
        self.tables.start(sequence, hits, draft.moves)
        num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
        self.tables.extend(sequence, num_tokens, draft.moves)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        request = sequence.request
        if request.num_cached_tokens is None:
            draft.started.append(request.index)
            request.num_cached_tokens = sequence.num_computed_tokens
            self._prompt_tokens += request.num_prompt_tokens
            self._cached_tokens += request.num_cached_tokens
        return draft.add_row(sequence, num_tokens)

    def begin(self, plan: StepPlan) -> None:
        """The step was launched, after the one that was begun before."""
        self._in_flight.begin(plan)

    def cancel(self, plan: StepPlan) -> None:
        """The step that was begun last will have no results."""
        self._in_flight.end(plan)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Enter the results of a step, and return the requests that it finished.

        In this order, but for rows that are not numbers, which fail their request before anybody can find their blocks:
        tokens count as computed; the blocks they filled become findable; where several tokens were sampled, the further
        continuations are forked off; the sampled tokens are appended, or what was pooled is added, which may finish
        sequences; finished sequences give back their blocks, which stay findable.
        """
        if not self.num_waiting:
            self._tail_steps += 1
            self._tail_step_rows += len(plan.rows)
        self._in_flight.end(plan)
        for row in plan.rows:
            row.sequence.take_back_placeholder()
        sampled = iter(output.sampled)
        finished = []
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            draws = tuple(islice(sampled, row.num_samples))
            if sequence.finished:
                continue  # since it was launched, or an earlier row failed the request that is theirs together
            if index in output.not_finite:
                sequence.request.fail(_not_numbers(sequence))
                finished.append(sequence.request)
                continue
            self.tables.advance(row)
            sequence.request.prompt_logprobs.extend(output.prompt_logprobs.get(index, ()))
            if pooler := sequence.request.pooler:
                pooler.add(output.pooled[index])
                if sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.finish("stop")
            if draws and sequence.request.beams:
                self._search(sequence.request.beams, sequence, draws[0])
            else:
                self._append(sequence, draws)
            if sequence.request.finished:
                finished.append(sequence.request)
        self._retire(finished)
        self._steps += 1
        self._step_rows += len(plan.rows)
        return finished

    def _append(self, sequence: Sequence, draws: tuple[Sampled, ...]) -> None:
        """Append what was drawn after `sequence`: the first to itself, each other to a continuation of its own."""
        # All are forked off before the first token is appended, which may finish the parent.
        continuations = [sequence, *(self._fork(sequence) for _ in draws[1:])]
        for continuation, drawn in zip(continuations, draws, strict=False):
            if drawn.token_id is None:
                sequence.request.fail(_no_token(continuation, drawn))
                return
            self._generated_tokens += 1
            if drawn.logprobs:
                continuation.add_logprobs(drawn.logprobs)
            try:
                continuation.append_token(drawn.token_id)
            except RequestError as error:
                sequence.request.fail(error)
                return
            if continuation.finished:
                self._forecast.record_finish(continuation)

    def _search(self, beams: BeamSearch, beam: Sequence, drawn: Sampled) -> None:
        """Note a beam's candidates; with those of the last one, the beams go on, or the search ends."""
        request = beam.request
        if drawn.token_id is None and not drawn.all_ruled_out:
            request.fail(_no_token(beam, drawn))
            return
        if not beams.offer(beam, drawn.candidates):
            return
        num_going_on = beams.advance(self._fork, self._drop)
        self._generated_tokens += num_going_on
        if num_going_on:
            return
        for answer in request.sequences if request.finished else ():
            self._forecast.record_finish(answer)
        if not request.finished:
            request.fail(_no_token(beam, drawn))

    def _drop(self, beam: Sequence) -> None:
        """Give up a beam, at once, so that its seat and its blocks are free for its siblings."""
        queue = self._running if beam.status is SequenceStatus.RUNNING else self._waiting
        queue.remove(beam)
        self.tables.forget(beam)
        beam.finish("abort")

    def _fork(self, parent: Sequence) -> Sequence:
        """Begin another continuation where `parent` has come to, and behind it and its siblings in the queue.

        It shares the parent's blocks. If there is no seat for it, it waits at the head of the queue, and holds no
        blocks, as if it had been preempted.
        """
        child = parent.request.fork(parent)
        if parent.status is SequenceStatus.WAITING:
            self.tables.share(parent, child)
        elif len(self._running) < self.config.max_num_seqs:
            self.tables.share(parent, child)
            child.status = SequenceStatus.RUNNING
            self._running.insert(_behind_siblings(child, self._running, self._running.index(parent)), child)
            return child
        self._waiting.insert(_behind_siblings(child, self._waiting, 0), child)
        return child

    def _retire(self, finished: list[Request]) -> None:
        """Forget these requests, and take every finished sequence out of its queue and out of its blocks."""
        for request in finished:
            del self._requests[request.index]
            self._new.remove(request)
            if self._adapters:
                self._adapters.release(request)
        self._in_flight.let_go([sequence for sequence in (*self._running, *self._waiting) if sequence.finished])
        self._running = [sequence for sequence in self._running if sequence.status is SequenceStatus.RUNNING]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.status is SequenceStatus.WAITING)

    def stats(self) -> EngineStats:
        pool, swap = self.tables.pool, self.tables.swap
        return EngineStats(
            running=len(self._running),
            waiting=self.num_waiting,
            kv_blocks_used=pool.num_usable - pool.num_free,
            kv_blocks_total=pool.num_usable,
            swap_blocks_used=swap.pool.num_usable - swap.pool.num_free,
            swap_blocks_total=swap.pool.num_usable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            step_rows=self._step_rows,
            tail_steps=self._tail_steps,
            tail_step_rows=self._tail_step_rows,
            preemptions=self._preemptions,
            swaps=self._swaps,
            swapped_blocks_out=swap.num_blocks_out,
            swapped_blocks_in=swap.num_blocks_in,
            lora_loads=self._adapters.num_loads if self._adapters else 0,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless queues, sequences and block references agree; for tests, between two steps."""
        waiting = [*self._waiting, *(request.sequences[0] for request in self._new)]
        self.tables.check_integrity([*self._running, *self._in_flight.lingering], waiting)
        queued = {id(sequence) for sequence in (*waiting, *self._running)}
        if queued != {id(sequence) for request in self._requests.values() for sequence in request.unfinished}:
            raise RuntimeError("scheduler: the queues and the requests disagree")
        if len(self._running) > self.config.max_num_seqs:
            raise RuntimeError("scheduler: more sequences run than there are seats")
        if self._adapters:
            self._adapters.check_integrity(self._requests.values())


def _order(config: SchedulerConfig, forecast: OutputForecast) -> WaitingRequests:
    if config.scheduling_policy == "fcfs":
        return ArrivalOrder(config.max_num_seqs)
    block_size = config.block_size if config.enable_prefix_caching else 0
    return PrefixOrder(config.max_num_seqs, block_size, forecast.output_tokens)


def _behind_siblings(sequence: Sequence, queue: MutableSequence[Sequence], place: int) -> int:
    """The first place in `queue`, from `place` on, where no sequence of the same request stands."""
    while place < len(queue) and queue[place].request is sequence.request:
        place += 1
    return place


def _no_token(sequence: Sequence, drawn: Sampled) -> RequestError:
    if drawn.all_ruled_out:
        return RequestError(
            f"After {sequence.num_tokens} tokens, the request's own rules leave no token to generate.",
            code="no_token_allowed",
            hint="Rules that can meet so: structured_output, allowed_token_ids, min_tokens, bad_words.",
        )
    return _not_numbers(sequence)


def _not_numbers(sequence: Sequence) -> RequestError:
    if sequence.request.pooler:
        return not_numbers("hidden states", code="nan_hidden_states")
    return not_numbers(f"logits after {sequence.num_tokens} tokens", code="nan_logits")
