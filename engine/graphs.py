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

import numpy as np
import torch
from torch import Tensor

from engine.adapter_slots import AdapterSlots
from engine.batch import StepArrays, StepInputs
from engine.device import Device, Graph
from engine.models.adapters import Adapters
from kernels.cache import NULL_BLOCK
from kernels.ops import AttentionBatch, AttentionPlan, KVCache

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
    """The graph of one size: `buffers` are what it reads, `refill` puts a step in what its attention was planned by."""

    def __init__(self, buffers: StepInputs, refill: Callable[[AttentionBatch], None], graph: Graph) -> None:
        self._buffers = buffers
        self._refill = refill
        self._graph = graph

    def pad(self, arrays: StepArrays) -> StepArrays:
        """The step with as many rows as the graph has; those that are added compute nothing that is kept."""
        missing = len(self._buffers.token_ids) - len(arrays.token_ids)
        slots = arrays.adapter_slots
        return arrays._replace(
            token_ids=np.pad(arrays.token_ids, (0, missing)),
            positions=np.pad(arrays.positions, (0, missing)),
            query_start=np.pad(arrays.query_start, (0, missing), mode="edge"),
            seq_lens=np.pad(arrays.seq_lens, (0, missing)),
            block_tables=np.pad(arrays.block_tables, ((0, missing), (0, 0)), constant_values=NULL_BLOCK),
            slot_mapping=np.pad(arrays.slot_mapping, (0, missing), constant_values=-1),
            query_lens=arrays.query_lens + (1,) * missing,
            context_lens=arrays.context_lens + (0,) * missing,
            adapter_slots=None if slots is None else np.pad(slots, (0, missing), constant_values=-1),
        )

    def replay(self, inputs: StepInputs) -> Tensor:
        """Run the forward pass of a padded step, in stream order; returns the hidden states of all its rows.

        They stay until any graph of the device is replayed again.
        """
        for buffer, values in zip(_tensors(self._buffers), _tensors(inputs), strict=True):
            # A block table may be narrower than the buffer: beyond a row's length nobody reads.
            buffer[tuple(map(slice, values.shape))].copy_(values)
        self._refill(inputs.attention)
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
            buffers = _empty_buffers(sizes[0], -(-max_model_len // kv.block_size), device.place)
            plans = model.reserve_plans(buffers.attention, kv, max_model_len)
        states: Tensor | None = None  # the largest graph's output, where the others put theirs as well

        def refill(batch: AttentionBatch) -> None:
            model.refill_plans(plans, batch, kv)

        @torch.inference_mode()
        def forward(inputs: StepInputs) -> Tensor:
            of_step = None
            if inputs.adapter_slots is not None:
                assert adapters is not None
                of_step = adapters.of_step(inputs.adapter_slots)
            hidden = model.forward(inputs.token_ids, inputs.positions, inputs.attention, kv, of_step, plans)
            return hidden if states is None else states[: len(hidden)].copy_(hidden)

        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}
        for size in sizes:
            for adapts in (False, True) if adapters else (False,):
                views = _first(size, buffers, adapts=adapts)
                graph = device.capture(partial(forward, views))
                states = graph.output if states is None else states
                self._graphs[size, adapts] = DecodeGraph(views, refill, graph)
        self._sizes = sorted(sizes)

    def fitting(self, arrays: StepArrays) -> DecodeGraph | None:
        """The graph for a step; None if a row computes more than one token, or if there are more rows than in any."""
        num_rows = len(arrays.seq_lens)
        if len(arrays.token_ids) != num_rows:
            return None
        size = next((size for size in self._sizes if size >= num_rows), None)
        return None if size is None else self._graphs[size, arrays.adapter_slots is not None]


def _empty_buffers(num_rows: int, num_blocks: int, place: torch.device) -> StepInputs:
    """Buffers of a step in which every row is padding."""

    def filled(value: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=place)

    return StepInputs(
        token_ids=filled(0, num_rows, dtype=torch.int64),
        positions=filled(0, num_rows, dtype=torch.int64),
        attention=AttentionBatch(
            query_start=filled(0, num_rows + 1, dtype=torch.int32),
            seq_lens=filled(0, num_rows, dtype=torch.int32),
            block_tables=filled(NULL_BLOCK, num_rows, num_blocks, dtype=torch.int32),
            slot_mapping=filled(-1, num_rows, dtype=torch.int64),
            query_lens=(1,) * num_rows,
            context_lens=(0,) * num_rows,
        ),
        adapter_slots=filled(-1, num_rows, dtype=torch.int64),
    )


def _first(num_rows: int, buffers: StepInputs, *, adapts: bool) -> StepInputs:
    """The buffers' first rows, for steps with adapters or without any."""
    attention, slots = buffers.attention, buffers.adapter_slots
    return StepInputs(
        buffers.token_ids[:num_rows],
        buffers.positions[:num_rows],
        AttentionBatch(
            attention.query_start[: num_rows + 1],
            attention.seq_lens[:num_rows],
            attention.block_tables[:num_rows],
            attention.slot_mapping[:num_rows],
            query_lens=(1,) * num_rows,
            context_lens=(0,) * num_rows,
        ),
        slots[:num_rows] if adapts and slots is not None else None,
    )


def _tensors(inputs: StepInputs) -> list[Tensor]:
    attention = inputs.attention
    tensors = [
        inputs.token_ids,
        inputs.positions,
        attention.query_start,
        attention.seq_lens,
        attention.block_tables,
        attention.slot_mapping,
    ]
    return tensors if inputs.adapter_slots is None else [*tensors, inputs.adapter_slots]
