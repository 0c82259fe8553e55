"""Low-rank adapters in one tensor for each factor of a projection, for kernels that add all of them in one launch.

Ranks are padded with zeros to the largest, a power of two.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.lora import LoraShape, LowRank

MAX_SLICES = 3
"""Parts of a projection with factors of their own: query, key and value."""
MAX_RANK = 256
_SMALLEST_RANK = 16


def padded_rank(max_rank: int) -> int:
    """Return the rank of stacks that hold adapters of up to `max_rank`."""
    return max(_SMALLEST_RANK, 1 << (max_rank - 1).bit_length())


class AdapterRows(NamedTuple):
    """A step's rows by the slot of their adapter.

    rows `[num_tokens]` int64: first those without an adapter, and those of slot s from `offsets[s]` to
    `offsets[s + 1]`. offsets `[num_slots + 1]` int32.
    """

    rows: Tensor
    offsets: Tensor


def sort_by_slot(slots: Tensor, num_slots: int) -> AdapterRows:
    """Sort the rows of a step by their adapter's slot, `[num_tokens]` integers, -1 for none; the order is stable.

    Nothing is read from the device.
    """
    by_slot, rows = slots.sort(stable=True)
    bounds = torch.arange(num_slots + 1, device=slots.device, dtype=slots.dtype)
    return AdapterRows(rows, torch.searchsorted(by_slot, bounds, out_int32=True))


class StackedLowRank(NamedTuple):
    """The factors of all adapters in memory for one projection, which consists of up to `MAX_SLICES` slices.

    a `[num_slots, num_slices, rank, in_features]`, b `[num_slots, out_features, rank]`, sizes the outputs of each
    slice. rank is a power of two from 16 to `MAX_RANK`; what an adapter lacks is zero.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def bytes_to_come(self) -> int:
        """See `kernels.lora.LoraSlots`: all that adapters take is taken already."""
        return 0

    def put(self, slot: int, factors: Sequence[LowRank] | None) -> None:
        """Write an adapter to a slot, in place of what was there; it may have factors for some of the slices only.

        Nothing waits for pinned factors. Raises `ValueError` for a pair whose columns are no slice, or whose rank is
        too large.
        """
        pairs = factors or ()
        places = {columns: index for index, columns in enumerate(pairwise(accumulate(self.sizes, initial=0)))}
        for pair in pairs:
            if (pair.start, pair.stop) not in places or len(pair.a) > self.rank:
                raise ValueError(
                    f"An adapter of rank {len(pair.a)} for outputs {pair.start} to {pair.stop} has no place among"
                    f" slices of {self.sizes} outputs and rank {self.rank}."
                )
        self.a[slot].zero_()
        self.b[slot].zero_()
        for pair in pairs:
            place = places[pair.start, pair.stop]
            self.a[slot, place, : len(pair.a)].copy_(pair.a, non_blocking=True)
            self.b[slot, pair.start : pair.stop, : len(pair.a)].copy_(pair.b, non_blocking=True)


def empty_low_rank(
    num_slots: int, max_rank: int, shape: LoraShape, dtype: torch.dtype, device: torch.device
) -> StackedLowRank:
    """Return slots without adapters. Raises `ValueError` for more than `MAX_SLICES` slices or above `MAX_RANK`."""
    in_features, sizes = shape
    if len(sizes) > MAX_SLICES or max_rank > MAX_RANK:
        raise ValueError(f"Adapters have up to {MAX_SLICES} slices and rank {MAX_RANK}, not {sizes} and {max_rank}.")
    rank = padded_rank(max_rank)
    a = torch.zeros((num_slots, len(sizes), rank, in_features), dtype=dtype, device=device)
    return StackedLowRank(a, a.new_zeros((num_slots, sum(sizes), rank)), sizes)


def pin_factors(pairs: Sequence[LowRank], device: torch.device) -> Sequence[LowRank]:
    """Return an adapter's factors in host memory from which a GPU copies while the host goes on."""
    if device.type != "cuda":
        return pairs
    # Pinning sets up the current device, which is another one if this is not the first.
    with torch.cuda.device(device):
        return [pair._replace(a=pair.a.pin_memory(), b=pair.b.pin_memory()) for pair in pairs]
