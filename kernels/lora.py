"""Low-rank adapters: what a fine-tune adds to a linear layer, for the rows of a batch that ask for it.

The adapters in memory are in numbered slots. Of a step it is known which slot each row's adapter is in:

    row      0  1  2  3  4  5
    slot     2  2 -1  0  0  2        -1: no adapter
    sorted   2 │ 3 4 │ 0 1 5         by slot, once a step; each projection of each layer is then added to
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.linear import Linear, PackLinear


class LowRank(NamedTuple):
    """One pair of factors for some of a layer's outputs: `y[:, start:stop] += x @ a.T @ b.T`.

    a `[rank, in_features]`, b `[stop - start, rank]`, the adapter's scaling included in b.
    """

    a: Tensor
    b: Tensor
    start: int
    stop: int


class LoraShape(NamedTuple):
    """A projection that takes adapters; `sizes` are the outputs of its slices, of which each has its own factors."""

    in_features: int
    sizes: tuple[int, ...]

    @property
    def elements_per_rank(self) -> int:
        """How many numbers the factors have for each unit of rank."""
        return len(self.sizes) * self.in_features + sum(self.sizes)


StagedFactors = Any
"""What `LoraKernels.stage` made, for `put` of the same table."""

LoraRows = Any
"""What `LoraKernels.sort_rows` made, for `add` of the same table."""


class LoraSlots(Protocol):
    """Room for adapters of one projection."""

    @property
    def bytes_to_come(self) -> int:
        """The most memory that adapters take once they are loaded, beside what is taken already."""
        ...

    def put(self, slot: int, factors: StagedFactors | None) -> None:
        """Put factors in a slot, in place of what was there; None: the adapter leaves this projection as it is."""
        ...


class _Allocate(Protocol):
    def __call__(
        self, num_slots: int, max_rank: int, shape: LoraShape, dtype: torch.dtype, device: torch.device
    ) -> LoraSlots: ...


class LoraKernels(NamedTuple):
    """Adapters in slots.

    allocate: Makes the slots of one projection, for adapters of up to `max_rank`.
    stage: Prepares an adapter's factors of one projection, which are on the host, for a device; in any thread.
    sort_rows: Sorts the rows of a step by their slot, `[num_tokens]` int64 on the device and -1 for none, given how
        many slots there are.
    add: Adds to each row of y `[num_tokens, out_features]`, in place, its adapter's product of the same row of x
        `[num_tokens, in_features]`, given the sorted rows and the projection's slots.
    """

    allocate: _Allocate
    stage: Callable[[Sequence[LowRank], torch.device], StagedFactors]
    sort_rows: Callable[[Tensor, int], LoraRows]
    add: Callable[[Tensor, Tensor, LoraRows, Any], None]


class PackedLowRank(NamedTuple):
    """An adapter's factors for one layer: the `a` of all pairs joined into one product, each `b` by itself."""

    shrink: Linear
    expand: tuple[Linear, ...]
    ranks: tuple[int, ...]
    columns: tuple[slice, ...]


def pack_low_rank(pairs: Sequence[LowRank], pack_linear: PackLinear[Tensor]) -> PackedLowRank:
    """Lay out the pairs of one layer, which share its input, with the device's `Kernels.pack_linear`."""
    return PackedLowRank(
        shrink=pack_linear(torch.cat([pair.a for pair in pairs]), None),
        expand=tuple(pack_linear(pair.b, None) for pair in pairs),
        ranks=tuple(len(pair.a) for pair in pairs),
        columns=tuple(slice(pair.start, pair.stop) for pair in pairs),
    )


class PackedSlots:
    """Slots of packed factors, which are as large as the adapter that is in each. See `LoraSlots`."""

    def __init__(
        self, num_slots: int, max_rank: int, shape: LoraShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bytes_to_come = num_slots * max_rank * shape.elements_per_rank * dtype.itemsize
        self._factors: list[PackedLowRank | None] = [None] * num_slots

    def __getitem__(self, slot: int) -> PackedLowRank | None:
        return self._factors[slot]

    def put(self, slot: int, factors: PackedLowRank | None) -> None:
        """See `LoraSlots`."""
        self._factors[slot] = factors


class Segment(NamedTuple):
    """Entries `start` to `stop` of a list of rows: those of the adapter in one slot."""

    slot: int
    start: int
    stop: int


class SortedRows(NamedTuple):
    """`rows` int64 holds each row with an adapter once, those of one slot side by side; None: all, in their order."""

    rows: Tensor | None
    segments: tuple[Segment, ...]


def sort_rows(slots: Tensor, num_slots: int) -> SortedRows:
    """Sort the rows of a step by slot, see `LoraKernels`. How many there are of each is read from the device."""
    # Entry 0 counts the rows without an adapter, which are the first.
    counts = torch.bincount(slots + 1, minlength=num_slots + 1).tolist()
    segments, start = [], 0
    for slot, count in enumerate(counts[1:]):
        if count:
            segments.append(Segment(slot, start, start + count))
            start += count
    if len(segments) == 1 and not counts[0]:
        return SortedRows(None, tuple(segments))
    return SortedRows(slots.argsort(stable=True)[counts[0] :], tuple(segments))


def lora_add(x: Tensor, y: Tensor, sorted_rows: SortedRows, slots: PackedSlots) -> None:
    """Add to rows of `y`, in place, what `LoraKernels` says, adapter by adapter.

    Rows are gathered and scattered once, however many adapters share them.
    """
    rows, segments = sorted_rows
    adding = [(start, stop, factors) for slot, start, stop in segments if (factors := slots[slot]) is not None]
    if not adding:
        return
    inputs = x if rows is None else x.index_select(0, rows)
    outputs = y if rows is None else y.new_zeros(len(rows), y.shape[1])
    for start, stop, factors in adding:
        shrunk = factors.shrink(inputs[start:stop]).split(factors.ranks, dim=1)
        for part, expand, columns in zip(shrunk, factors.expand, factors.columns, strict=True):
            outputs[start:stop, columns] += expand(part)
    if rows is not None:
        y.index_add_(0, rows, outputs)


def packed_lora(pack_linear: PackLinear[Tensor]) -> LoraKernels:
    """Return the kernels of adapters whose factors are linears of a device."""
    return LoraKernels(PackedSlots, partial(_stage, pack_linear), sort_rows, lora_add)


def _stage(pack_linear: PackLinear[Tensor], pairs: Sequence[LowRank], device: torch.device) -> PackedLowRank:
    return pack_low_rank([pair._replace(a=pair.a.to(device), b=pair.b.to(device)) for pair in pairs], pack_linear)
