"""Graphs of the forward pass for steps in which every row computes one token.

A step of n such rows is replayed from the graph of the least size that holds them. All sizes read the same buffers:

    size 8, of 5 rows
    token_ids     b9  c4  d0  e7  f1   0   0   0
    slot_mapping  s1  s2  s3  s4  s5  -1  -1  -1         -1 writes nothing
    seq_lens      10   5   1   8   2   0   0   0         and reads nothing
    query_start    0   1   2   3   4   5   5   5   5     nor does anybody ask for more
    adapter_slots -1   2   2  -1   0  -1  -1  -1         in graphs for steps with adapters alone
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.adapter_slots import AdapterSlots
from engine.device import Device, Graph
from engine.models.adapters import Adapters
from engine.plan import StepPlan
from kernels.ops import AttentionBatch, AttentionPlan, KVCache
from kernels.reference_inputs import InputTensors, allocate_inputs, fill_with_padding

# From 8 on so close together that few of a step's rows are padding, and so far that capturing takes seconds.
_SIZES = (1, 2, 4, 8, *range(16, 256, 16), *range(256, 513, 32))


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows to have graphs for, in falling order: the largest holds `max_num_seqs` rows, or is 512."""
    smaller = [size for size in _SIZES if size < max_num_seqs]
    return [*_SIZES[len(smaller) : len(smaller) + 1], *reversed(smaller)]


class GraphModel(Protocol):
    """What is captured of `engine.models.decoder.Decoder`."""

    def reserve_plans(self, batch: AttentionBatch, kv: KVCache, max_context_len: int) -> Sequence[AttentionPlan]: ...

    def refill_plans(self, plans: Sequence[AttentionPlan], batch: AttentionBatch, kv: KVCache) -> None: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
        plans: Sequence[AttentionPlan] | None = None,
    ) -> Tensor: ...


class DecodeGraph:
    """The graph of one size.

    Attributes:
        inputs, adapter_slots: What it reads: a step, padded to its size. One without adapters has no slots.
    """

    def __init__(
        self,
        inputs: InputTensors,
        adapter_slots: Tensor | None,
        refill: Callable[[AttentionBatch], None],
        graph: Graph,
    ) -> None:
        self.inputs = inputs
        self.adapter_slots = adapter_slots
        self._refill = refill
        self._graph = graph

    def replay(self, batch: AttentionBatch) -> Tensor:
        """Run the forward pass of the step that is in `inputs`, in stream order; `batch` is that step for attention.

        Returns the hidden states of all its rows. They stay until any graph of the device is replayed again.
        """
        self._refill(batch)
        self._graph.replay()
        return self._graph.output


class DecodeGraphs:
    """Graphs for some numbers of rows, see `graph_sizes`, of up to `max_model_len` tokens each.

    They are captured here, the largest first: it takes the memory that the others use again. With `adapters` there is
    one more of each size, for steps in which a row has one.
    """

    def __init__(
        self,
        model: GraphModel,
        kv: KVCache,
        device: Device,
        adapters: AdapterSlots | None = None,
        *,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        with torch.inference_mode():
            buffers = allocate_inputs(sizes[0], sizes[0], -(-max_model_len // kv.block_size), device.place)
            fill_with_padding(buffers)
            slots = torch.full((sizes[0],), -1, dtype=torch.int64, device=device.place)
            plans = model.reserve_plans(_all_padding(buffers), kv, max_model_len)
        states: Tensor | None = None  # the largest graph's output, where the others put theirs as well

        def refill(batch: AttentionBatch) -> None:
            model.refill_plans(plans, batch, kv)

        @torch.inference_mode()
        def forward(inputs: InputTensors, adapter_slots: Tensor | None) -> Tensor:
            of_step = None
            if adapter_slots is not None:
                assert adapters is not None
                of_step = adapters.of_step(adapter_slots)
            batch = _all_padding(inputs)
            hidden = model.forward(inputs.token_ids, inputs.positions, batch, kv, of_step, plans)
            return hidden if states is None else states[: len(hidden)].copy_(hidden)

        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}
        for size in sizes:
            for adapts in (False, True) if adapters else (False,):
                views, of_tokens = _first(size, buffers), slots[:size] if adapts else None
                graph = device.capture(partial(forward, views, of_tokens))
                states = graph.output if states is None else states
                self._graphs[size, adapts] = DecodeGraph(views, of_tokens, refill, graph)
        self._sizes = sorted(sizes)

    def fitting(self, plan: StepPlan, *, adapts: bool) -> DecodeGraph | None:
        """The graph for a step; None if a row computes more than one token, or if there are more rows than in any.

        `adapts` says whether any of its rows has an adapter.
        """
        num_rows = len(plan.rows)
        if plan.num_tokens != num_rows:
            return None
        size = next((size for size in self._sizes if size >= num_rows), None)
        return None if size is None else self._graphs[size, adapts]


def _first(num_rows: int, buffers: InputTensors) -> InputTensors:
    """The buffers' first rows."""
    return InputTensors(
        buffers.token_ids[:num_rows],
        buffers.positions[:num_rows],
        buffers.slot_mapping[:num_rows],
        buffers.query_start[: num_rows + 1],
        buffers.seq_lens[:num_rows],
        buffers.block_tables[:num_rows],
    )


def _all_padding(inputs: InputTensors) -> AttentionBatch:
    """A step for attention of which every row is padding."""
    num_rows = len(inputs.seq_lens)
    return inputs.attention((1,) * num_rows, (0,) * num_rows)
