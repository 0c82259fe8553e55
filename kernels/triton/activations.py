"""Gated activations: half of a projection weighs the other, both rounded where `kernels.reference` rounds them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Specialisation, launch_for

_ROOT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_ROOT_OF_2_BY_PI = tl.constexpr(2 * 0.7978845608028654)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.silu_and_mul`."""
    return _activate_and_mul(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.gelu_and_mul`."""
    return _activate_and_mul(gate_up, "gelu")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.reference.gelu_tanh_and_mul`."""
    return _activate_and_mul(gate_up, "gelu_tanh")


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """As `kernels.reference.clamped_swiglu`."""
    return _activate_and_mul(gate_up, "clamped_swiglu", alpha, limit)


def _activate_and_mul(gate_up: Tensor, activation: str, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """`alpha` and `limit` are those of `clamped_swiglu`; the others have none."""
    gate_up = gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    launch = launch_for("activate_and_mul", gate_up.device)
    grid = (num_tokens, triton.cdiv(size, launch.meta["BLOCK"]))
    activate_and_mul_kernel[grid](gate_up, out, size, alpha, limit, ACTIVATION=activation, **launch.options)
    return out


@triton.jit
def activate_and_mul_kernel(gate_up_ptr, out_ptr, size, alpha, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + token * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        out = _rounded(_times_sigmoid(gate, gate), dtype) * up
    elif ACTIVATION == "gelu":
        out = _rounded(gate * 0.5 * (1 + tl.erf(gate * _ROOT_HALF)), dtype) * up
    elif ACTIVATION == "gelu_tanh":
        # x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
        cubic = gate + 0.044715 * gate * gate * gate
        out = _rounded(_times_sigmoid(gate, cubic * _TWICE_ROOT_OF_2_BY_PI), dtype) * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        limit = _rounded(tl.full((BLOCK,), limit, tl.float32), dtype)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        share = _rounded(1 / (1 + tl.exp(-_rounded(alpha * gate, dtype))), dtype)
        out = _rounded(gate * share, dtype) * _rounded(up + 1, dtype)
    tl.store(out_ptr + token * size + column, out.to(dtype), mask=inside)


@triton.jit
def _times_sigmoid(x, y):
    return x / (1 + tl.exp(-y))


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


SPECIALISATIONS: tuple[Specialisation, ...] = tuple(
    Specialisation(
        activate_and_mul_kernel,
        "activate_and_mul",
        {
            "gate_up_ptr": f"*{dtype}:16",
            "out_ptr": f"*{dtype}:16",
            "size": "i32:16",
            "alpha": "fp32",
            "limit": "fp32",
            "ACTIVATION": activation,
        },
        hot=True,
        variant=f"{activation} {dtype}",
    )
    for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
    for dtype in ("bf16", "fp16")
)
