"""Linear layers in 8-bit integers in C++: tokens are quantised, multiplied and scaled in one call."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import int8
from kernels.cpu import glue
from kernels.cpu.panels import PANEL, gates_beside_ups, whole_panels, zero_panels
from kernels.linear import Activation, GateUp, Linear, gate_up_packer


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """As `kernels.int8.int8_linear`. Other types than bfloat16 are torch's."""
    if weight.dtype != torch.bfloat16:
        return int8.int8_linear(weight, bias)
    return _quantized(weight, bias, whole_panels)(len(weight), "plain")


def int8_gate_up(weight: Tensor, bias: Tensor | None, activation: Activation) -> GateUp:
    """Return the product of gate and up, as `int8_linear` has it, and activated where it is stored."""
    if weight.dtype != torch.bfloat16:
        return gate_up_packer(int8.int8_linear, glue.ACTIVATIONS)(weight, bias, activation)
    linear_of = _quantized(weight, bias, gates_beside_ups)
    size = len(weight) // 2
    return GateUp(
        product=linear_of(size, "gate_up"),
        activate_and_mul=glue.ACTIVATIONS[activation],
        activated=linear_of(size, activation),
    )


def _quantized(
    weight: Tensor, bias: Tensor | None, in_panels: Callable[[Tensor], Tensor]
) -> Callable[[int, str], Linear]:
    """Pack a weight, and return what makes a linear of it: of so many outputs, stored in a way of `outputs.h`."""
    values, weight_scales = int8.quantize_weight(weight)
    packed = _packed(in_panels(values))
    scales, sums = in_panels(weight_scales), in_panels(values.sum(dim=1, dtype=torch.int32))
    wide_bias = None if bias is None else in_panels(bias.float())

    def linear_of(size: int, kind: str) -> Linear:
        def apply(x: Tensor) -> Tensor:
            out: Tensor = torch.ops.pagemill_cpu.int8_linear(x, packed, scales, sums, wide_bias, size, kind)
            return out

        return apply

    return linear_of


def _packed(values: Tensor) -> Tensor:
    """Lay out `[out_features, in_features]`, whole panels, as `int8.h` reads it: `[out / 32, in / 4, 2, 16, 4]`."""
    panels = values.view(-1, 2, PANEL // 2, values.shape[1] // 4, 4).permute(0, 3, 1, 2, 4)
    return zero_panels(tuple(panels.shape), values.dtype).copy_(panels)
