"""One step on the device: one forward pass, one sampling pass, no request changed.

    launch    the plan's inputs are placed, and its forward pass put on the device
    sample    sampling is put on the device behind it; the tokens before those that it draws are known by now
    collect   waits for the results

`execute` is all three. Between them nothing waits for the device: every number goes to it and comes from it by
`engine.device`, and what a branch depends on is on the host.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, repeat
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.adapter_slots import AdapterSlots, StepAdapters
from engine.batch import SamplingBatch, StepInputs, sampling_batch
from engine.block_moves import BlockMover
from engine.device import Device, Download
from engine.errors import OutOfMemory
from engine.inputs import InputBuilder
from engine.models.adapters import Adapters
from engine.plan import BlockMove, PlanRow, Sampled, StepOutput, StepPlan
from engine.pooling.rows import sum_tokens, wanted_places
from engine.row_slots import RowSlots
from engine.sampling.penalties import PenaltyRows
from engine.sampling.prompt_logprobs import compute_prompt_logprobs, read_prompt_logprobs, wanted_tokens
from engine.sampling.sampler import read_draws, sample
from engine.structured.grammar import GrammarMasks
from kernels.ops import AttentionBatch, KVCache

_T = TypeVar("_T")

_NOTHING = Sampled(None)


class Model(Protocol):
    """What a step needs of `engine.models.decoder.Decoder`."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class StepInFlight:
    """A step between its launch and its results.

    Attributes:
        plan: What was launched.
        wanted, pooled: What its rows want of the hidden states, see `wanted_tokens` and `wanted_places`.
        rows: Those that sample, by their place in the plan, without those that had finished by then.
        sampling: What `sample` was told of them; None if there are none.
        computed, drawn: What the two passes will have on the host.
        states: On the device, between the passes: the final hidden states to sample from.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.wanted = wanted_tokens(plan.rows)
        self.pooled = wanted_places(plan.rows)
        self.rows: dict[int, PlanRow] = {}
        self.sampling: SamplingBatch | None = None
        self.computed: Download | None = None
        self.drawn: Download | None = None
        self.states: Tensor | None = None


class Runner:
    """Runs plans of a scheduler whose blocks are those of `kv`.

    `mover` moves them, `inputs` places steps on the device, and `adapters` are the slots of the adapters that rows
    have. No step has rows of more than `max_num_seqs` sequences.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        device: Device,
        mover: BlockMover,
        inputs: InputBuilder,
        adapters: AdapterSlots | None = None,
        *,
        max_num_seqs: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._device = device
        self._mover = mover
        self._inputs = inputs
        self._grammar_masks = GrammarMasks(device)
        self._penalty_rows = PenaltyRows(RowSlots(max_num_seqs))
        self._adapters = adapters

    def move_blocks(self, moves: Iterable[BlockMove]) -> None:
        """Carry out a plan's moves, in their order. They never run out of memory."""
        self._mover.move(moves)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's tokens and sample: all of a step at once. Raises `OutOfMemory`, see `launch`."""
        step = self.launch(plan)
        self.sample(step)
        return self.collect(step)

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Put the plan's forward pass on the device. Placeholders stand for tokens that the step before has drawn.

        Raises `OutOfMemory` if the step does not fit the device. Then nothing happened that counts: what was written
        to the KV cache lies beyond every request's `num_computed_tokens`.
        """
        return within_memory(partial(self._launch, plan), plan, self._device)

    def sample(self, step: StepInFlight) -> None:
        """Put the step's sampling on the device; all tokens before those that it draws are known. Raises as `launch`.

        Nothing is drawn for sequences that have finished meanwhile.
        """
        try:
            within_memory(partial(self._sample, step), step.plan, self._device)
        except OutOfMemory:
            self._penalty_rows.forget()
            raise

    def collect(self, step: StepInFlight) -> StepOutput:
        """Wait for a step that was launched and sampled, and return its results."""
        assert step.computed is not None
        finite, *others = step.computed.wait()
        pooled = dict(zip(step.pooled, others.pop(), strict=True)) if step.pooled else {}
        drawn = read_draws(step.sampling, step.drawn.wait()) if step.sampling and step.drawn else []
        prompts = read_prompt_logprobs(step.wanted, others)
        return StepOutput(_in_plan_order(step, drawn), prompts, pooled, _not_finite(step.plan, finite))

    def _launch(self, plan: StepPlan) -> StepInFlight:
        step = StepInFlight(plan)
        inputs, logits_rows, graph = self._inputs.place(plan)

        @torch.inference_mode()
        def compute() -> list[Tensor]:
            if graph:
                hidden = graph.replay(inputs.attention)[: plan.num_tokens]
            else:
                adapters = self._adapters_of(inputs)
                hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.attention, self._kv, adapters)
            step.states = hidden[logits_rows]
            tensors = [hidden.isfinite().all(dim=-1)]
            tensors += compute_prompt_logprobs(hidden, step.wanted, self._model.logits, self._device)
            if step.pooled:
                tensors.append(sum_tokens(hidden, list(step.pooled.values()), self._device))
            return tensors

        step.computed = self._device.download(compute)
        return step

    def _adapters_of(self, inputs: StepInputs) -> StepAdapters | None:
        if inputs.adapter_slots is None:
            return None
        assert self._adapters is not None
        return self._adapters.of_step(inputs.adapter_slots)

    def _sample(self, step: StepInFlight) -> None:
        step.rows = {
            index: row for index, row in enumerate(step.plan.rows) if row.num_samples and not row.sequence.finished
        }
        if not step.rows:
            return
        rows = list(step.rows.values())
        batch = sampling_batch(rows, self._device, self._penalty_rows)._replace(grammar=self._grammar_masks.fill(rows))
        (kept,) = self._device.upload(_draws_of(step)) if len(rows) < _num_sampling(step.plan) else (None,)
        enter = self._inputs.enter(rows)

        @torch.inference_mode()
        def draw() -> list[Tensor]:
            assert step.states is not None
            states = step.states if kept is None else step.states[kept]
            step.states = None
            draws = sample(self._model.logits(states), batch, self._device)
            enter(draws.token_ids)
            return draws.tensors()

        step.sampling = batch
        step.drawn = self._device.download(draw)


def _num_sampling(plan: StepPlan) -> int:
    return sum(row.num_samples > 0 for row in plan.rows)


def _draws_of(step: StepInFlight) -> np.ndarray:
    """The places of the draws of `step.rows` among those of all rows of the plan."""
    ends = np.cumsum([row.num_samples for row in step.plan.rows])
    return np.concatenate([np.arange(ends[index] - row.num_samples, ends[index]) for index, row in step.rows.items()])


def _in_plan_order(step: StepInFlight, drawn: list[Sampled]) -> tuple[Sampled, ...]:
    """What was drawn for the rows of the plan, and no token for those for which nothing was."""
    remaining = iter(drawn)
    return tuple(
        one
        for index, row in enumerate(step.plan.rows)
        for one in (islice(remaining, row.num_samples) if index in step.rows else repeat(_NOTHING, row.num_samples))
    )


def _not_finite(plan: StepPlan, finite: np.ndarray) -> frozenset[int]:
    """The rows with a token whose final hidden state is not finite; `finite` says it of each token, bool.

    What is not finite in a layer is so in the residual stream from there on, and so in the end.
    """
    if finite.all():
        return frozenset()
    ends = np.cumsum([row.num_tokens for row in plan.rows])
    rows = np.searchsorted(ends, np.flatnonzero(~finite), side="right")
    return frozenset(rows.tolist())


def within_memory(work: Callable[[], _T], plan: StepPlan, device: Device) -> _T:
    """Return `work()`. Raises `OutOfMemory` for whichever way torch says it; by then its tensors are gone."""
    try:
        return work()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        message = str(error)
    # Only here, outside of the handler, are the step's tensors gone: the exception's traceback held them.
    device.release_memory()
    raise OutOfMemory(f"A step of {plan.num_tokens} tokens does not fit the memory: {message}")


def _is_out_of_memory(error: RuntimeError) -> bool:
    # CUDA has an exception of its own for it; the CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
