"""Low-rank adapters: what a fine-tune adds to a linear layer, for the rows of a batch that ask for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear import Linear


class LowRank(NamedTuple):
    """One pair of factors for some of a layer's outputs: `y[:, start:stop] += x @ a.T @ b.T`.

    a `[rank, in_features]`, b `[stop - start, rank]`, the adapter's scaling included in b.
    """

    a: Tensor
    b: Tensor
    start: int
    stop: int


class PackedLowRank(NamedTuple):
    """An adapter's factors for one layer: the `a` of all pairs joined into one product, each `b` by itself."""

    shrink: Linear
    expand: tuple[Linear, ...]
    ranks: tuple[int, ...]
    columns: tuple[slice, ...]


class Segment(NamedTuple):
    """Entries `start` to `stop` of a list of rows: those of one adapter."""

    start: int
    stop: int
    weights: PackedLowRank


def pack_low_rank(pairs: Sequence[LowRank], pack_linear: Callable[[Tensor, Tensor | None], Linear]) -> PackedLowRank:
    """Lay out the pairs of one layer, which share its input, with the device's `Kernels.pack_linear`."""
    return PackedLowRank(
        shrink=pack_linear(torch.cat([pair.a for pair in pairs]), None),
        expand=tuple(pack_linear(pair.b, None) for pair in pairs),
        ranks=tuple(len(pair.a) for pair in pairs),
        columns=tuple(slice(pair.start, pair.stop) for pair in pairs),
    )


def lora_add(x: Tensor, y: Tensor, rows: Tensor | None, segments: Sequence[Segment]) -> None:
    """Add to rows of `y` `[num_tokens, out_features]`, in place, their adapter's product of the same rows of `x`.

    x is `[num_tokens, in_features]`. `rows` int64 holds each row at most once, those of one adapter side by side, and
    `segments` says which; None stands for all rows in their order. Rows are gathered and scattered once, however many
    adapters share them.
    """
    inputs = x if rows is None else x.index_select(0, rows)
    outputs = y if rows is None else y.new_zeros(len(rows), y.shape[1])
    for start, stop, weights in segments:
        shrunk = weights.shrink(inputs[start:stop]).split(weights.ranks, dim=1)
        for part, expand, columns in zip(shrunk, weights.expand, weights.columns, strict=True):
            outputs[start:stop, columns] += expand(part)
    if rows is not None:
        y.index_add_(0, rows, outputs)
