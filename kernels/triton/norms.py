"""Root-mean-square norms, with the residual sum before them and the cast to float8 behind: one program for each row.

A row is in registers as a whole: it is read once and written once, and its sums do not depend on its batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Specialisation, launch_for

_FLOAT8_LARGEST = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.rms_norm`."""
    return _rms_norm(x, weight, eps, rounds_first=True)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.add_rms_norm`."""
    return _add_rms_norm(x, residual, weight, eps, rounds_first=True)


def rms_norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.rms_norm_float32`."""
    return _rms_norm(x, weight, eps, rounds_first=False)


def add_rms_norm_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.add_rms_norm_float32`."""
    return _add_rms_norm(x, residual, weight, eps, rounds_first=False)


def add_rms_norm_float8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, in_float32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.reference.add_rms_norm_float8`."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    total, scales = torch.empty_like(residual), torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, out, total, scales, eps, rounds_first=not in_float32)
    return out, scales, total


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x.reshape(-1, x.shape[-1]), None, weight, out, None, None, eps, rounds_first=rounds_first)
    return out


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounds_first: bool
) -> tuple[Tensor, Tensor]:
    out, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(residual)
    _launch(x, residual, weight, out, total, None, eps, rounds_first=rounds_first)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    scales: Tensor | None,
    eps: float,
    *,
    rounds_first: bool,
) -> None:
    """Write `out`, and `total` and `scales` where they are wanted, all contiguous; x's rows may lie apart."""
    num_rows, size = x.shape
    if num_rows == 0:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        residual if residual is None else residual.contiguous(),
        weight,
        out,
        total,
        scales,
        x.stride(0),
        size,
        eps,
        ROUNDS_FIRST=rounds_first,
        BLOCK=block,
        **launch_for(_launch_row(block), x.device).options,
    )


def _launch_row(block: int) -> str:
    for largest in (1024, 4096, 8192):
        if block <= largest:
            return f"rms_norm/{largest}"
    return "rms_norm"


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    scales_ptr,
    x_stride,
    size,
    eps,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * size + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row * size + column, x, mask=inside)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if ROUNDS_FIRST:
        y = y.to(dtype).to(tl.float32)
    y = (y * weight).to(dtype)
    if scales_ptr is not None:
        y = _quantise(y.to(tl.float32), inside, scales_ptr + row)
    tl.store(out_ptr + row * size + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantise(y, inside, scale_ptr):
    """Store the row's scale, NaN where something is not finite, and return what is to be cast to float8."""
    # A maximum drops NaN, which a sum of zeros does not.
    unsound = tl.sum(y * 0.0, axis=0)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(y), axis=0), _FLOAT8_LARGEST), _SMALLEST_NORMAL)
    tl.store(scale_ptr, tl.where(unsound == 0.0, scale, float("nan")))
    y = tl.where(unsound == 0.0, tl.div_rn(y, scale), 0.0)
    return tl.minimum(tl.maximum(y, -_FLOAT8_LARGEST), _FLOAT8_LARGEST)


def _specialisation(block: int, dtype: str, *, residual: bool, float8: bool = False) -> Specialisation:
    pointer = f"*{dtype}:16"
    return Specialisation(
        rms_norm_kernel,
        _launch_row(block),
        {
            "x_ptr": pointer,
            "residual_ptr": pointer if residual else None,
            "weight_ptr": pointer,
            "out_ptr": "*fp8e4nv:16" if float8 else pointer,
            "total_ptr": pointer if residual else None,
            "scales_ptr": "*fp32:16" if float8 else None,
            "x_stride": "i32:16",
            "size": "i32:16",
            "eps": "fp32",
            "ROUNDS_FIRST": dtype == "bf16",
            "BLOCK": block,
        },
        hot=True,
        float8=float8,
        variant=f"{block} {dtype}" + (" residual" if residual else "") + (" float8" if float8 else ""),
    )


SPECIALISATIONS: tuple[Specialisation, ...] = (
    *(
        _specialisation(block, dtype, residual=residual)
        for block in (1024, 4096, 8192, 16384)
        for dtype, residual in (("bf16", True), ("bf16", False), ("fp16", True))
    ),
    *(_specialisation(block, "bf16", residual=True, float8=True) for block in (1024, 4096, 8192, 16384)),
)
