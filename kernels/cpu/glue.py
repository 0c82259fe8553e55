"""Norms, rotations and activations in C++, one pass over memory each. Other types than bfloat16 are torch's."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels import reference
from kernels.linear import ActivateAndMul, Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.rms_norm`."""
    if x.dtype != torch.bfloat16:
        return reference.rms_norm(x, weight, eps)
    out: Tensor = torch.ops.pagemill_cpu.rms_norm(x, weight, eps, True)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.add_rms_norm`."""
    if x.dtype != torch.bfloat16:
        return reference.add_rms_norm(x, residual, weight, eps)
    out: tuple[Tensor, Tensor] = torch.ops.pagemill_cpu.add_rms_norm(x, residual, weight, eps, True)
    return out


def rms_norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.rms_norm_float32`."""
    if x.dtype != torch.bfloat16:
        return reference.rms_norm_float32(x, weight, eps)
    out: Tensor = torch.ops.pagemill_cpu.rms_norm(x, weight, eps, False)
    return out


def add_rms_norm_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.add_rms_norm_float32`."""
    if x.dtype != torch.bfloat16:
        return reference.add_rms_norm_float32(x, residual, weight, eps)
    out: tuple[Tensor, Tensor] = torch.ops.pagemill_cpu.add_rms_norm(x, residual, weight, eps, False)
    return out


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.rotary_embedding`."""
    if query.dtype != torch.bfloat16:
        return reference.rotary_embedding(query, key, cos, sin)
    rotate = torch.ops.pagemill_cpu.rotary_embedding
    return rotate(query, cos, sin), rotate(key, cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.silu_and_mul`."""
    if gate_up.dtype != torch.bfloat16:
        return reference.silu_and_mul(gate_up)
    out: Tensor = torch.ops.pagemill_cpu.silu_and_mul(gate_up)
    return out


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.gelu_and_mul`."""
    if gate_up.dtype != torch.bfloat16:
        return reference.gelu_and_mul(gate_up)
    out: Tensor = torch.ops.pagemill_cpu.gelu_and_mul(gate_up)
    return out


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.gelu_tanh_and_mul`."""
    if gate_up.dtype != torch.bfloat16:
        return reference.gelu_tanh_and_mul(gate_up)
    out: Tensor = torch.ops.pagemill_cpu.gelu_tanh_and_mul(gate_up)
    return out


ACTIVATIONS: Mapping[Activation, ActivateAndMul] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}
