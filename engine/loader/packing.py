"""From the weights of linears to what multiplies by them on a device, quantised on the way where that was asked for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.config import Quantize
from engine.errors import ConfigError
from kernels.linear import Activation, Packers
from kernels.ops import GateUp, Kernels, Linear
from kernels.quantize import LinearWeight, int4_group_size, quantize_float8, quantize_int4
from kernels.reference_quantized import Float8Weight, Int4Weight

_NEEDS = {
    "int4": "an NVIDIA GPU from sm_80 on (Ampere), and triton",
    "fp8": "an NVIDIA GPU that computes in 8-bit floating point, from sm_89 on (Ada, Hopper), and triton",
}
# Tensor cores take no other activations.
_DTYPES = (torch.bfloat16, torch.float16)


def check_quantize(quantize: Quantize | None, kernels: Kernels) -> None:
    """Raise `ConfigError` if `kernels` have no products of what `quantize` makes."""
    missing = {"int4": kernels.int4 is None, "fp8": kernels.float8 is None}
    if quantize is not None and missing.get(quantize):
        raise ConfigError(
            f"quantize {quantize} needs {_NEEDS[quantize]}, which this device is not.",
            hint="Leave it out; on a GPU from sm_80 on there is int4, on a CPU int8.",
        )


def multiplies(kind: type[Int4Weight] | type[Float8Weight], dtype: torch.dtype, kernels: Kernels | None) -> bool:
    """Whether weights of this kind are multiplied as they are by activations in `dtype`; without `kernels`, by some."""
    served = kernels is None or (kernels.int4 if kind is Int4Weight else kernels.float8) is not None
    return served and dtype in _DTYPES


class LinearPacker:
    """Packs linears of activations in `dtype`, quantised as `EngineConfig.quantize` says.

    Raises `ConfigError` where `quantize` asks for products that there are not, on the device or in `dtype`.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype, quantize: Quantize | None) -> None:
        check_quantize(quantize, kernels)
        if quantize in _NEEDS and dtype not in _DTYPES:
            raise ConfigError(
                f"quantize {quantize} multiplies bfloat16 or float16, and the dtype is {str(dtype).split('.')[1]}.",
                hint="Set dtype to bfloat16.",
            )
        self._quantize = quantize
        plain: Packers[Tensor] = Packers(kernels.pack_linear, kernels.pack_gate_up)
        offered: dict[type, Packers[Any] | None] = {
            Tensor: kernels.int8 if quantize == "int8" else plain,
            Int4Weight: kernels.int4,
            Float8Weight: kernels.float8,
        }
        self._packers = {kind: packers for kind, packers in offered.items() if packers is not None}
        self._activation = kernels.activate_and_mul

    def linear(self, parts: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        """Pack a weight that may lie in parts along its outputs, one mostly, and the bias of all."""
        if len(parts) > 1:
            sizes = [_out_features(part) for part in parts]
            biases = [None] * len(parts) if bias is None else bias.split(sizes)
            return _side_by_side([self.linear([part], of_part) for part, of_part in zip(parts, biases, strict=True)])
        weight = self._quantized(parts[0])
        return self._packers[type(weight)].linear(weight, bias)

    def gate_up(self, parts: Sequence[LinearWeight], bias: Tensor | None, activation: Activation) -> GateUp:
        """As `linear`, of gate and up: gate first."""
        if len(parts) > 1:
            return GateUp.of(self.linear(parts, bias), self._activation(activation))
        weight = self._quantized(parts[0])
        return self._packers[type(weight)].gate_up(weight, bias, activation)

    def head(self, weight: Tensor) -> Linear:
        """Pack the language head, which only int8 quantises: checkpoints in fewer bits leave it out as well."""
        return self._packers[Tensor].linear(weight, None)

    def _quantized(self, weight: LinearWeight) -> LinearWeight:
        if isinstance(weight, Tensor):
            if self._quantize == "fp8":
                return quantize_float8(weight)
            if self._quantize == "int4" and (group_size := int4_group_size(weight.shape[1])):
                return quantize_int4(weight, group_size)
        return weight


def _side_by_side(linears: Sequence[Linear]) -> Linear:
    def apply(x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in linears], dim=-1)

    return apply


def _out_features(weight: LinearWeight) -> int:
    return len(weight) if isinstance(weight, Tensor) else len(weight.values)
