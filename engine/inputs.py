"""How a plan becomes the inputs of a forward pass on the device: there are two ways, and one seam.

HostInputs     the host writes every number, `engine.batch.lay_out`: where the device is the host
RowInputs      the device keeps rows, and builds the numbers from them, `engine.row_state`: a GPU, whose next step is
               launched before the tokens of the last one are known
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.batch import StepInputs, lay_out
from engine.device import Device
from engine.graphs import DecodeGraph
from engine.plan import PlanRow, StepPlan
from kernels.ops import AttentionBatch


class PlacedStep(NamedTuple):
    """What a step computes, once everything submitted so far has run.

    Attributes:
        inputs: If there is a graph, they are in its buffers, and are padded to its size.
        logits_rows: `[R]` int64, the places in the flat batch whose logits are wanted, once a sample.
        graph: What replays the forward pass; None if no graph does.
    """

    inputs: StepInputs
    logits_rows: Tensor
    graph: DecodeGraph | None = None


class InputBuilder(Protocol):
    """Brings the inputs of steps to the device."""

    def place(self, plan: StepPlan) -> PlacedStep:
        """Build the plan's inputs, in stream order. They stand until the next call."""
        ...

    def enter(self, rows: Sequence[PlanRow]) -> Callable[[Tensor], None]:
        """Return what is to be called, in stream order, with the tokens drawn for `rows` of the plan placed last.

        They are `[num_draws]` int64, row after row.
        """
        ...


class HostInputs:
    """An `InputBuilder` for steps that are planned when all tokens before them are known."""

    def __init__(self, block_size: int, device: Device) -> None:
        self._block_size = block_size
        self._device = device

    def place(self, plan: StepPlan) -> PlacedStep:
        """See `InputBuilder`."""
        arrays = lay_out(plan, self._block_size)
        slots = () if arrays.adapter_slots is None else (arrays.adapter_slots,)
        token_ids, positions, query_start, seq_lens, block_tables, slot_mapping, logits_rows, *placed_slots = (
            self._device.upload(
                arrays.token_ids,
                arrays.positions,
                arrays.query_start,
                arrays.seq_lens,
                arrays.block_tables,
                arrays.slot_mapping,
                arrays.logits_rows,
                *slots,
            )
        )
        attention = AttentionBatch(
            query_start,
            seq_lens,
            block_tables,
            slot_mapping,
            arrays.query_lens,
            arrays.context_lens,
            host_block_tables=arrays.block_tables,
        )
        adapter_slots = placed_slots[0] if placed_slots else None
        return PlacedStep(StepInputs(token_ids, positions, attention, adapter_slots), logits_rows)

    def enter(self, rows: Sequence[PlanRow]) -> Callable[[Tensor], None]:
        """See `InputBuilder`. The next plan has the tokens."""
        return _leave_to_the_plan


def _leave_to_the_plan(token_ids: Tensor) -> None:
    pass
