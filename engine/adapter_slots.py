"""Where the factors of the adapters in memory are, and how a step finds them.

slot                 0   1   2
adapter              b   –   a
tokens of a step     a a a   none   b
their slots          2 2 2    -1    0

A slot is written in stream order: a step on the device still reads the adapter that was there when it was launched.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.device import Device
from engine.models.adapters import Place, Projection
from engine.plan import PlanRow
from kernels.lora import LoraKernels, LoraRows, LoraShape, LoraSlots, LowRank, StagedFactors


class AdapterSlots:
    """Room for `num_slots` adapters of rank `max_rank` at most, for the projections of a decoder on `device`."""

    def __init__(
        self,
        shapes: Mapping[Place, LoraShape],
        kernels: LoraKernels,
        device: Device,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots = num_slots
        self._kernels = kernels
        self._device = device
        self._slots: dict[Place, LoraSlots] = {
            place: kernels.allocate(num_slots, max_rank, shape, dtype, device.place) for place, shape in shapes.items()
        }

    @property
    def bytes_to_come(self) -> int:
        """The most memory that adapters take on the device once they are loaded, beside what is allocated."""
        return sum(slots.bytes_to_come for slots in self._slots.values())

    def stage(self, pairs: Sequence[LowRank]) -> StagedFactors:
        """Prepare an adapter's factors of one projection, which are on the host, for `put`. Called by any thread."""
        return self._kernels.stage(pairs, self._device.place)

    def put(self, slot: int, factors: Mapping[Place, StagedFactors]) -> None:
        """Put an adapter in a slot, in stream order, in place of the one there. It changes the projections named."""
        self._device.submit(partial(self._put, slot, factors))

    def of_step(self, slots: Tensor) -> "StepAdapters":
        """The adapters of a step's tokens, see `StepInputs.adapter_slots`. To be called in stream order."""
        return StepAdapters(self._kernels, self._slots, self._kernels.sort_rows(slots, self.num_slots))

    def _put(self, slot: int, factors: Mapping[Place, StagedFactors]) -> None:
        for place, slots in self._slots.items():
            slots.put(slot, factors.get(place))


class StepAdapters:
    """The adapters of one step, as the decoder calls them."""

    def __init__(self, kernels: LoraKernels, slots: Mapping[Place, LoraSlots], rows: LoraRows) -> None:
        self._kernels = kernels
        self._slots = slots
        self._rows = rows

    def add(self, layer: int, projection: Projection, x: Tensor, y: Tensor) -> None:
        """See `engine.models.adapters.Adapters`."""
        self._kernels.add(x, y, self._rows, self._slots[layer, projection])


def slots_of_tokens(rows: Sequence[PlanRow]) -> np.ndarray | None:
    """The slot of each token's adapter, int64, -1 for none; None if no row of the plan has one."""
    adapters = [row.sequence.request.adapter for row in rows]
    if not any(adapters):
        return None
    slots = [-1 if adapter is None else adapter.slot for adapter in adapters]
    return np.repeat(np.array(slots, dtype=np.int64), [row.num_tokens for row in rows])
