"""A step's inputs from rows on the device, of which each running sequence has one: see `kernels.reference_inputs`.

    host        plan i+1 ──► which rows, where they start,              tokens of i ──► commit i ──► plan i+2
                             prompt tokens, new blocks
                               │ one transfer
    device      sample i ──► last_sampled ──► build i+1 ──► forward i+1 ──► sample i+1 ──► last_sampled ──► build i+2

What goes to the device in a step is what is new to it: a prompt's tokens in the step that computes them, a block when
it is first written to, and for each sequence where it has come to. The host knows what the tables on the device hold,
so that it sends no block twice, whatever became of the step in which it was reserved.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.adapter_slots import slots_of_tokens
from engine.batch import StepInputs, tokens_of
from engine.device import Device
from engine.graphs import DecodeGraph, DecodeGraphs
from engine.inputs import PlacedStep
from engine.plan import PlanRow, StepPlan
from engine.row_slots import RowSlots
from kernels.cache import NULL_BLOCK
from kernels.ops import Kernels
from kernels.reference_inputs import InputTensors, RowState, StepRows, allocate_inputs


class RowInputs:
    """An `InputBuilder` for steps of up to `max_num_seqs` sequences of up to `max_model_len` tokens each.

    With `graphs`, steps in which every row computes one token are placed in their buffers, as far as they go.
    """

    def __init__(
        self,
        block_size: int,
        device: Device,
        kernels: Kernels,
        *,
        max_num_seqs: int,
        max_model_len: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        shape = (max_num_seqs, -(-max_model_len // block_size))
        self._block_size = block_size
        self._device = device
        self._kernels = kernels
        self._graphs = graphs
        self._slots = RowSlots(max_num_seqs)
        self._rows = RowState(
            block_tables=torch.zeros(shape, dtype=torch.int32, device=device.place),
            last_sampled=torch.zeros(max_num_seqs, dtype=torch.int32, device=device.place),
        )
        self._tables = np.zeros(shape, dtype=np.int32)  # what those on the device hold
        # By row, the list of blocks of which all that were written to are in the table. A sequence that lost its
        # blocks has another list when it goes on.
        self._entered: list[list[int] | None] = [None] * max_num_seqs

    def place(self, plan: StepPlan) -> PlacedStep:
        """See `InputBuilder`."""
        slots = np.array(self._slots.take(row.sequence for row in plan.rows), dtype=np.int64)
        starts = np.array([row.start for row in plan.rows], dtype=np.int64)
        lengths = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        context_lens = starts + lengths
        num_blocks = -(-context_lens // self._block_size)
        cells, blocks = self._new_blocks(plan.rows, slots, starts // self._block_size, num_blocks)
        adapter_slots = slots_of_tokens(plan.rows)
        graph = self._graphs.fitting(plan, adapts=adapter_slots is not None) if self._graphs else None
        room = self._room(plan, int(num_blocks.max()), graph)

        *step, new_cells, new_blocks, logits_rows, of_adapters = self._device.upload(
            slots.astype(np.int32),
            query_start,
            starts.astype(np.int32),
            tokens_of(plan, np.int32),
            cells,
            blocks,
            np.repeat(query_start[1:].astype(np.int64) - 1, [row.num_samples for row in plan.rows]),
            np.empty(0, dtype=np.int64) if adapter_slots is None else adapter_slots,
        )
        self._device.submit(partial(self._build, StepRows(*step), new_cells, new_blocks, room))
        self._tables.reshape(-1)[cells] = blocks
        for slot, row in zip(slots.tolist(), plan.rows, strict=True):
            self._entered[slot] = row.sequence.block_ids

        inputs = self._inputs(room, slots, lengths, context_lens, num_blocks)
        if adapter_slots is not None:
            inputs = inputs._replace(adapter_slots=self._place_adapters(of_adapters, graph))
        return PlacedStep(inputs, logits_rows, graph)

    def enter(self, rows: Sequence[PlanRow]) -> Callable[[Tensor], None]:
        """See `InputBuilder`. Of several tokens drawn for a row, the last is entered: nobody reads it. What goes on
        with one of them is planned when it is known.
        """
        slots = np.array([self._slots[row.sequence] for row in rows], dtype=np.int32)
        draws = np.cumsum([row.num_samples for row in rows], dtype=np.int32) - 1
        return partial(self._kernels.advance_rows, self._rows, *self._device.upload(slots, draws))

    def _new_blocks(
        self, rows: Sequence[PlanRow], slots: np.ndarray, first_written: np.ndarray, num_blocks: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the tables on the device lack for a step: flat places in them, `[n]` int64, and blocks, `[n]` int32."""
        goes_on = [
            self._entered[slot] is row.sequence.block_ids for slot, row in zip(slots.tolist(), rows, strict=True)
        ]
        # A shared block that is written to was copied: of a sequence that goes on, none before it has changed.
        firsts = np.where(goes_on, first_written, 0)
        counts = num_blocks - firsts
        total = int(counts.sum())
        blocks = np.fromiter(
            chain.from_iterable(
                row.sequence.block_ids[first:end]
                for row, first, end in zip(rows, firsts.tolist(), num_blocks.tolist(), strict=True)
            ),
            dtype=np.int32,
            count=total,
        )
        begins = np.cumsum(counts) - counts
        cells = np.arange(total) + np.repeat(slots * self._tables.shape[1] + firsts - begins, counts)
        is_new = self._tables.reshape(-1)[cells] != blocks
        return cells[is_new], blocks[is_new]

    def _room(self, plan: StepPlan, num_columns: int, graph: DecodeGraph | None) -> InputTensors:
        if graph is None:
            return allocate_inputs(plan.num_tokens, len(plan.rows), num_columns, self._device.place)
        return graph.inputs._replace(block_tables=graph.inputs.block_tables[:, :num_columns])

    @torch.inference_mode()
    def _build(self, step: StepRows, cells: Tensor, blocks: Tensor, room: InputTensors) -> None:
        if len(cells):
            self._rows.block_tables.view(-1).scatter_(0, cells, blocks)
        self._kernels.build_inputs(self._rows, step, self._block_size, room)

    def _inputs(
        self,
        room: InputTensors,
        slots: np.ndarray,
        lengths: np.ndarray,
        context_lens: np.ndarray,
        num_blocks: np.ndarray,
    ) -> StepInputs:
        """What the decoder takes of a step built in `room`; rows beyond the step's are padding of a token each."""
        padded_rows, num_columns = room.block_tables.shape
        missing = padded_rows - len(slots)
        tables = np.full((padded_rows, num_columns), NULL_BLOCK, dtype=np.int32)
        is_used = np.arange(num_columns) < num_blocks[:, np.newaxis]
        np.copyto(tables[: len(slots)], self._tables[slots, :num_columns], where=is_used)
        attention = room.attention(
            (*lengths.tolist(), *[1] * missing), (*context_lens.tolist(), *[0] * missing), host_block_tables=tables
        )
        return StepInputs(room.token_ids, room.positions, attention)

    def _place_adapters(self, slots: Tensor, graph: DecodeGraph | None) -> Tensor:
        """Bring the adapters of a step's tokens to where its forward pass reads them."""
        if graph is None:
            return slots
        assert graph.adapter_slots is not None
        self._device.submit(partial(_fill_slots, graph.adapter_slots, slots))
        return graph.adapter_slots


@torch.inference_mode()
def _fill_slots(target: Tensor, slots: Tensor) -> None:
    target.fill_(-1)[: len(slots)] = slots


def row_state_bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """The memory that rows take on the device."""
    return max_num_seqs * (1 + -(-max_model_len // block_size)) * torch.int32.itemsize
