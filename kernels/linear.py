"""Linear layers whose weight has been laid out once for the machine that will multiply by it."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import reference

Linear = Callable[[Tensor], Tensor]
"""`[num_tokens, in_features]` to `[num_tokens, out_features]`, in the weight's dtype."""

Activation = Literal["silu", "gelu", "gelu_tanh"]

ActivateAndMul = Callable[[Tensor], Tensor]
"""Gate and up `[num_tokens, 2 * intermediate_size]`, gate first, to `activation(gate) * up`."""


Weight = TypeVar("Weight", contravariant=True)
"""A weight `[out_features, in_features]`: a tensor, or one of the layouts of `kernels.reference_quantized`."""


class PackLinear(Protocol[Weight]):
    """Lays out a weight `[out_features, in_features]` and its bias `[out_features]`."""

    def __call__(self, weight: Weight, bias: Tensor | None) -> Linear: ...


class GateUp(NamedTuple):
    """The projections of gate and up as one product, and the activation that follows: together, or one by one where
    something is added between them. Both ways have the same bits.
    """

    product: Linear
    activate_and_mul: ActivateAndMul
    activated: Linear

    @classmethod
    def of(cls, product: Linear, activate_and_mul: ActivateAndMul) -> "GateUp":
        """Return one whose activation is a pass of its own."""
        return cls(product, activate_and_mul, lambda x: activate_and_mul(product(x)))


class PackGateUp(Protocol[Weight]):
    """Lays out a weight `[2 * intermediate_size, in_features]`, gate first, and its bias."""

    def __call__(self, weight: Weight, bias: Tensor | None, activation: Activation) -> GateUp: ...


class Packers(NamedTuple, Generic[Weight]):
    """What lays out weights of one kind: any linear's, and those of gate and up with the activation that follows."""

    linear: PackLinear[Weight]
    gate_up: PackGateUp[Weight]


REFERENCE_ACTIVATIONS: Mapping[Activation, ActivateAndMul] = {
    "silu": reference.silu_and_mul,
    "gelu": reference.gelu_and_mul,
    "gelu_tanh": reference.gelu_tanh_and_mul,
}


def gate_up_packer(
    pack_linear: PackLinear[Weight], activations: Mapping[Activation, ActivateAndMul] = REFERENCE_ACTIVATIONS
) -> PackGateUp[Weight]:
    """Return what packs gate and up with `pack_linear`, to be followed by a pass of one of `activations`."""

    def pack(weight: Weight, bias: Tensor | None, activation: Activation) -> GateUp:
        return GateUp.of(pack_linear(weight, bias), activations[activation])

    return pack


def packers(
    pack_linear: PackLinear[Weight], activations: Mapping[Activation, ActivateAndMul] = REFERENCE_ACTIVATIONS
) -> Packers[Weight]:
    """Return `pack_linear`, and what packs gate and up with it as `gate_up_packer` does."""
    return Packers(pack_linear, gate_up_packer(pack_linear, activations))


# oneDNN chooses the packed layout for a batch of this many rows; measured good from 1 to 2048 rows.
_BATCH_HINT = 64


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return `x @ weight.T + bias` with the weight kept as it is; weight `[out_features, in_features]`."""

    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return apply


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return `x @ weight.T + bias` with the weight packed by oneDNN, or kept as it is where oneDNN cannot pack it."""
    if not _packs(weight.dtype):
        return plain_linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            # A row alone is summed in another order than the same row among others: give it company.
            return multiply(x.expand(2, -1))[:1]
        return multiply(x)

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    return apply


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Try whether this build of torch on this processor packs and multiplies weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        product = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(product, weight)
