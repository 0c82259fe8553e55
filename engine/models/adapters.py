"""How low-rank adapters reach into the decoder."""

from typing import Literal, Protocol

from torch import Tensor

from kernels.ops import Linear

Projection = Literal["qkv", "attention_out", "gate_up", "down"]
"""The fused products of a layer, in the order in which a layer computes them."""

Place = tuple[int, Projection]
"""A projection of a layer of the decoder."""


class Adapters(Protocol):
    """The adapters of one step: which rows of the batch have which is known to the object, not to the decoder."""

    def add(self, layer: int, projection: Projection, x: Tensor, y: Tensor) -> None:
        """Add to `y` `[num_tokens, out_features]`, in place, each row's low-rank product of `x`
        `[num_tokens, in_features]`.

        `y` is `projection` of `x`, bias included; `qkv` and `gate_up` are joined along their outputs in that order.
        """


def project(linear: Linear, x: Tensor, layer: int, projection: Projection, adapters: Adapters | None) -> Tensor:
    """Return `linear(x)` with what the adapters add to this projection of the layer."""
    y = linear(x)
    if adapters is not None:
        adapters.add(layer, projection, x, y)
    return y
