"""Who runs in the next step, with how many tokens and in which blocks.

A step, and what happens if it stops between two of its verbs:

    schedule()            execute(plan)             commit(plan, output)
    ├ running requests    ├ forward: KV into the    ├ num_computed_tokens advances
    │   grow, or preempt  │   blocks of the plan    ├ full blocks become findable
    ├ waiting requests    └ sample                  ├ sampled tokens are appended
    │   are admitted                                └ finished requests give back their blocks
    └ blocks are reserved

`schedule` moves requests between the queues and reserves blocks, and nothing else: a plan that is never committed (the
device was out of memory) leaves every request with the tokens it had, and scheduling again is all there is to do.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from engine.blocks import BlockHash, BlockPool
from engine.config import SchedulerConfig
from engine.errors import RequestError
from engine.info import EngineStats
from engine.lora import LoraCache
from engine.plan import PlanRow, Sampled, StepOutput, StepPlan
from engine.request import Request
from engine.sequence import Sequence, SequenceStatus


class OutputLengthEstimate:
    """How much of its `max_tokens` a sequence will use: the share that finished ones used.

    A moving average over about 16 sequences. It begins at 0.7, and every preemption takes it half of the way to 1,
    since preemption shows that the estimate was too low.
    """

    def __init__(self) -> None:
        self._share = 0.7

    def remaining_tokens(self, sequence: Sequence) -> int:
        """The predicted number of tokens still to come: at least one, but none where the prompt is only pooled."""
        if sequence.request.pooler:
            return 0
        return max(1, int(self._share * sequence.request.max_tokens) - sequence.num_output_tokens)

    def record_finish(self, sequence: Sequence) -> None:
        self._share += (sequence.num_output_tokens / sequence.request.max_tokens - self._share) / 16

    def record_preemption(self) -> None:
        self._share = (self._share + 1) / 2


class Scheduler:
    """Owns the requests, their sequences and, through the block pool, their blocks.

    Deterministic: no clock, no randomness.
    """

    def __init__(self, config: SchedulerConfig, adapters: LoraCache | None = None) -> None:
        self.config = config
        self._adapters = adapters
        self.pool = BlockPool(config.num_kv_blocks)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission: the youngest stands last
        self._requests: dict[int, Request] = {}
        self._estimate = OutputLengthEstimate()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._steps = self._preemptions = 0

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
        self._waiting.extend(request.sequences)

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
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    # The one invariant: in every sequence `num_computed_tokens` chases `num_tokens`, and a step computes some or all
    # of the tokens between the two. There are no phases. A new prompt is far behind, and catches up in chunks; a
    # prefix hit starts it further ahead; one that generates is one token behind, for ever; a preempted one is
    # as far behind as a prompt of all its tokens.
    def schedule(self, token_budget: int | None = None) -> StepPlan:
        """Plan the next step within `token_budget`, by default `max_num_batched_tokens`.

        The plan is empty only if there is no request, or every one of them waits for an adapter to be loaded. Running
        sequences come first; waiting ones are admitted only into a step in which nobody was preempted, so that what was
        freed is not given away at once.
        """
        budget = self.config.max_num_batched_tokens if token_budget is None else token_budget
        rows: list[PlanRow] = []
        preemptions_before = self._preemptions
        position = 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if not self._grow(sequence, num_tokens):
                break  # it was the youngest, and preempted itself
            rows.append(_row(sequence, num_tokens))
            budget -= num_tokens
            position += 1
        if self._preemptions == preemptions_before:
            self._admit(rows, budget)
        return StepPlan(tuple(rows), sum(row.num_tokens for row in rows))

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve blocks for the next tokens, preempting from the youngest on; False if that was `sequence` itself."""
        missing = self._blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)
        while missing > self.pool.num_free:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += self.pool.allocate(max(0, missing))
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._release_blocks(victim)
        victim.num_computed_tokens = 0
        if victim.request.pooler:
            victim.request.pooler.reset()
        victim.status = SequenceStatus.WAITING
        self._waiting.appendleft(victim)
        self._preemptions += 1
        self._estimate.record_preemption()

    def _admit(self, rows: list[PlanRow], budget: int) -> None:
        """Start waiting requests in order, while rows, tokens and predicted blocks last.

        One whose next block is being computed by another row of this same step is passed over: a step later it finds
        that block in the cache. So is one whose adapter is not in memory. They keep their places in the queue.
        """
        if not self._waiting or len(self._running) == self.config.max_num_seqs:
            return
        in_progress = self._blocks_in_progress(rows)
        passed_over: list[Sequence] = []
        promised = sum(self._predicted_growth(sequence) for sequence in self._running)
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            if self._adapters and not self._adapters.acquire(sequence.request):
                passed_over.append(self._waiting.popleft())
                continue
            hits, next_hash = self._match_prefix(sequence)
            if next_hash in in_progress:
                passed_over.append(self._waiting.popleft())
                if len(passed_over) == self.config.max_num_seqs:
                    break
                continue
            start = len(hits) * self.config.block_size
            need = self._blocks_for(sequence.num_tokens + self._estimate.remaining_tokens(sequence)) - len(hits)
            available = self.pool.num_free - self.pool.num_free_among(hits) - promised
            # With nobody running, everything is free: the pool holds any one sequence of max_model_len.
            if need > available and self._running:
                break
            self._waiting.popleft()
            num_tokens = min(sequence.num_tokens - start, budget)
            self._start(sequence, hits, num_tokens)
            row = _row(sequence, num_tokens)
            rows.append(row)
            in_progress |= self._blocks_in_progress([row])
            promised += self._predicted_growth(sequence)
            budget -= num_tokens
        self._waiting.extendleft(reversed(passed_over))

    def _start(self, sequence: Sequence, hits: list[int], num_tokens: int) -> None:
        self.pool.acquire(hits)
        sequence.num_computed_tokens = len(hits) * self.config.block_size
        missing = self._blocks_for(sequence.num_computed_tokens + num_tokens) - len(hits)
        sequence.block_ids = hits + self.pool.allocate(missing)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_computed_tokens
            self._prompt_tokens += request.num_prompt_tokens
            self._cached_tokens += request.num_cached_tokens

    def _match_prefix(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """The cached blocks that `sequence` begins with, and the hash of the first full block that is not among them.

        The last token is never a hit: its logits are wanted, so it has to be computed. Nor is any token of a request
        that pools them all.
        """
        pooler = sequence.request.pooler
        if not self.config.enable_prefix_caching or (pooler and pooler.needs_all_tokens):
            return [], None
        hashes = sequence.block_hashes(self.config.block_size, (sequence.num_tokens - 1) // self.config.block_size)
        hits = self.pool.match_prefix(hashes)
        return hits, hashes[len(hits)] if len(hits) < len(hashes) else None

    def _blocks_in_progress(self, rows: Iterable[PlanRow]) -> set[BlockHash]:
        """The hashes of all blocks that these rows fill in this step."""
        if not self.config.enable_prefix_caching:
            return set()
        block_size = self.config.block_size
        filled: set[BlockHash] = set()
        for sequence, start, num_tokens, _ in rows:
            first, end = start // block_size, (start + num_tokens) // block_size
            if end > first:
                filled.update(sequence.block_hashes(block_size, end)[first:])
        return filled

    def _predicted_growth(self, sequence: Sequence) -> int:
        """Blocks that a running sequence will probably ask for before it ends."""
        predicted = self._blocks_for(sequence.num_tokens + self._estimate.remaining_tokens(sequence))
        return max(0, predicted - len(sequence.block_ids))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Enter the results of a step, and return the requests that it finished.

        In this order: tokens count as computed; the blocks they filled become findable; the sampled token is
        appended, or what was pooled is added, which may finish the sequence; finished sequences give back their
        blocks, which stay findable.
        """
        sampled = iter(output.sampled)
        finished = []
        for index, row in enumerate(plan.rows):
            sequence = row.sequence
            self._advance(sequence, row.num_tokens)
            if pooler := sequence.request.pooler:
                pooler.add(output.pooled[index])
                if sequence.num_computed_tokens == sequence.num_tokens:
                    sequence.finish("stop")
            for token in islice(sampled, row.num_samples):
                self._append(sequence, token)
            if sequence.status is SequenceStatus.FINISHED:
                if sequence.finish_reason != "error" and not sequence.request.pooler:
                    self._estimate.record_finish(sequence)
                if sequence.request.finished:
                    finished.append(sequence.request)
        self._retire(finished)
        self._steps += 1
        return finished

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        if sampled.token_id is None:
            sequence.request.fail(_nan_logits(sequence))
            return
        self._generated_tokens += 1
        if sampled.logprobs:
            sequence.logprobs.append(sampled.logprobs)
        sequence.append_token(sampled.token_id)

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        block_size = self.config.block_size
        first_filled = sequence.num_computed_tokens // block_size
        sequence.num_computed_tokens += num_tokens
        end = sequence.num_computed_tokens // block_size
        if self.config.enable_prefix_caching and end > first_filled:
            hashes = sequence.block_hashes(block_size, end)
            for index in range(first_filled, end):
                self.pool.register(sequence.block_ids[index], hashes[index])

    def _retire(self, finished: list[Request]) -> None:
        """Forget these requests, and take every finished sequence out of its queue and out of its blocks."""
        for request in finished:
            del self._requests[request.index]
            if self._adapters:
                self._adapters.release(request)
        for sequence in self._running:
            if sequence.status is SequenceStatus.FINISHED:
                self._release_blocks(sequence)
        self._running = [sequence for sequence in self._running if sequence.status is SequenceStatus.RUNNING]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.status is SequenceStatus.WAITING)

    def _release_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_used=self.pool.num_usable - self.pool.num_free,
            kv_blocks_total=self.pool.num_usable,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            preemptions=self._preemptions,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless queues, sequences and block references agree; for tests, between two steps."""
        self.pool.check_integrity()
        held: dict[int, int] = {}
        for sequence in self._running:
            for block_id in sequence.block_ids:
                held[block_id] = held.get(block_id, 0) + 1
        if held != self.pool.references():
            raise RuntimeError("scheduler: the blocks that sequences hold are not those that the pool gave out")
        queued = {id(sequence) for sequence in (*self._waiting, *self._running)}
        if queued != {id(sequence) for request in self._requests.values() for sequence in request.unfinished}:
            raise RuntimeError("scheduler: the queues and the requests disagree")
        if any(sequence.block_ids for sequence in self._waiting):
            raise RuntimeError("scheduler: a waiting sequence holds blocks")


def _row(sequence: Sequence, num_tokens: int) -> PlanRow:
    start = sequence.num_computed_tokens
    samples = start + num_tokens == sequence.num_tokens and not sequence.request.pooler
    return PlanRow(sequence, start, num_tokens, num_samples=int(samples))


def _nan_logits(sequence: Sequence) -> RequestError:
    return RequestError(
        f"The model's logits after {sequence.num_tokens} tokens are not numbers.",
        code="nan_logits",
        hint="With dtype float16 this is often an overflow: try bfloat16 or float32.",
    )
