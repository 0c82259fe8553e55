"""Products of bfloat16 or float16 activations with weights of four bits (W4A16), unpacked tile by tile.

The weight is the left operand: its outputs are the rows of the tensor core's instruction, of which `wgmma` takes 64 at
least, and the tokens, often one or a few, are its columns. Unpacked weights then stay in registers.

A group's integers are multiplied as such, exactly, and its scale is applied in float32 to their sum. Unpacking an
integer takes no conversion: its bits are or'ed into the mantissa of 128 (bfloat16) or 1024 (float16).

Up to `DEQUANTIZE_ABOVE` rows, a row's bits are the same whatever shares its batch: tiles of inputs, their order and
their splits (`kernels.triton.split_k`) depend on the weight alone. A larger batch is multiplied by cuBLAS with weights
that are unpacked, and rounded to the activations' dtype, for this one call. That differs in rounding, as cuBLAS's own
products of two batches do: whoever needs the same bits needs batches on one side of the border.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Linear
from kernels.reference_quantized import INT4_PAIRED, Int4Weight
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.split_k import empty_partials, fills_card, num_splits, sum_splits

DEQUANTIZE_ABOVE = 256
"""Rows above which unpacking all of the weight, 4.5 bytes of traffic for each number, costs less than unpacking its
tiles once for every 64 rows."""

_FEW_TOKENS = 16


@triton.jit
def _offset_integers(nibbles, DTYPE: tl.constexpr):
    """Return integers from 0 to 15, uint8, as `DTYPE`, raised by `_raised(DTYPE)`."""
    if DTYPE == tl.bfloat16:
        return (nibbles.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (nibbles.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def _raised(DTYPE: tl.constexpr):
    return 128.0 if DTYPE == tl.bfloat16 else 1024.0


@triton.jit
def _zeros(zeros_ptr, places, inside, DTYPE: tl.constexpr):
    """Return a group's zeros, raised as `_offset_integers` are; all of it is exact in `DTYPE`."""
    if zeros_ptr is None:
        return (tl.full(places.shape, 8.0, tl.float32) + _raised(DTYPE)).to(DTYPE)
    else:
        return (tl.load(zeros_ptr + places, mask=inside, other=0).to(tl.float32) + _raised(DTYPE)).to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def w4a16_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    group_size,
    tiles_of_split,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write `[num_tokens, out_features]`, or with a second grid axis above one, each split's part of it in float32.

    The grid is (tiles of outputs, splits that are not summed here, tiles of tokens). `BLOCK_K` divides `group_size`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_token = outputs < out_features, tokens < num_tokens
    places = tl.arange(0, HALF)
    # Where the low halves of these bytes lie in a row of x; see `Int4Weight`.
    low_places = places // 16 * 32 + places % 16
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * in_features + low_places[None, :]
    value_rows = values_ptr + outputs.to(tl.int64)[:, None] * (in_features // 2) + places[None, :]
    k_tiles = in_features // BLOCK_K

    first = tl.program_id(1) * tiles_of_split
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for split in range(SPLITS):
        start = first + split * tiles_of_split
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for tile in range(start, tl.minimum(start + tiles_of_split, k_tiles)):
            packed = tl.load(value_rows + tile * HALF, mask=is_output[:, None], other=0)
            low_x = tl.load(x_rows + tile * BLOCK_K, mask=is_token[:, None], other=0.0)
            high_x = tl.load(x_rows + tile * BLOCK_K + 16, mask=is_token[:, None], other=0.0)
            group = tile * BLOCK_K // group_size * out_features + outputs
            scales = tl.load(scales_ptr + group, mask=is_output, other=0.0).to(tl.float32)
            zeros = _zeros(zeros_ptr, group, is_output, DTYPE)[:, None]
            sums = tl.dot(_offset_integers(packed & 0xF, DTYPE) - zeros, tl.trans(low_x))
            sums = tl.dot(_offset_integers(packed >> 4, DTYPE) - zeros, tl.trans(high_x), sums)
            part += sums * scales[:, None]
        total += part

    inside = is_token[:, None] & is_output[None, :]
    row = tl.program_id(1).to(tl.int64) * num_tokens + tokens
    out = tl.trans(total)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_features + outputs[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_int4_kernel(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    out_features,
    in_features,
    group_size,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the weight, `[out_features, in_features]`, rounded once from float32."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_K // 2
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < out_features
    places = tl.arange(0, HALF)
    start = tl.program_id(1) * BLOCK_K
    rows = outputs.to(tl.int64)[:, None]
    packed = tl.load(values_ptr + rows * (in_features // 2) + start // 2 + places, mask=is_output[:, None], other=0)
    group = start // group_size * out_features + outputs
    scales = tl.load(scales_ptr + group, mask=is_output, other=0.0).to(tl.float32)[:, None]
    zeros = _zeros(zeros_ptr, group, is_output, DTYPE).to(tl.float32)[:, None]
    low = (_offset_integers(packed & 0xF, DTYPE).to(tl.float32) - zeros) * scales
    high = (_offset_integers(packed >> 4, DTYPE).to(tl.float32) - zeros) * scales
    to = out_ptr + rows * in_features + start + places // 16 * 32 + places % 16
    tl.store(to, low.to(DTYPE), mask=is_output[:, None])
    tl.store(to + 16, high.to(DTYPE), mask=is_output[:, None])


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight, `[out_features, in_features]`, rounded to `dtype`, bfloat16 or float16."""
    launch = launch_for("dequantize_int4", weight.values.device)
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.values.device)
    block_k = _inputs_of_a_tile(weight)
    grid = (triton.cdiv(weight.out_features, launch.meta["BLOCK_N"]), weight.in_features // block_k)
    dequantize_int4_kernel[grid](
        *weight, out, weight.out_features, weight.in_features, weight.group_size, BLOCK_K=block_k, **launch.options
    )
    return out


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in `x.dtype`, as `kernels.reference_quantized.int4_linear` defines it.

    x `[num_tokens, in_features]` bfloat16 or float16, contiguous; bias `[out_features]`. Above `DEQUANTIZE_ABOVE` rows
    all of the weight is held in `x.dtype` while it is multiplied.
    """
    if len(x) > DEQUANTIZE_ABOVE:
        return F.linear(x, dequantize_int4(weight, x.dtype), bias)
    return multiply_int4(x, weight, bias)


def multiply_int4(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """Do as `int4_linear` by tiles, whatever the number of rows."""
    launch = launch_for("w4a16/16" if len(x) <= _FEW_TOKENS else "w4a16/64", x.device)
    block_k = _inputs_of_a_tile(weight)
    k_tiles = weight.in_features // block_k
    splits = num_splits(weight.out_features, k_tiles)
    row_tiles = triton.cdiv(len(x), launch.meta["BLOCK_M"])
    apart = splits if not fills_card(weight.out_features, row_tiles) else 1
    out = torch.empty((len(x), weight.out_features), dtype=x.dtype, device=x.device)
    target = out if apart == 1 else empty_partials(x, splits, weight.out_features)
    grid = (triton.cdiv(weight.out_features, launch.meta["BLOCK_N"]), apart, row_tiles)
    w4a16_kernel[grid](
        x,
        *weight,
        bias if apart == 1 else None,
        target,
        len(x),
        weight.out_features,
        weight.in_features,
        weight.group_size,
        triton.cdiv(k_tiles, splits),
        SPLITS=splits // apart,
        BLOCK_K=block_k,
        **launch.options,
    )
    if apart > 1:
        sum_splits(target, bias, out)
    return out


def pack_int4_linear(weight: Int4Weight, bias: Tensor | None) -> Linear:
    """Return `int4_linear` of one weight."""

    def apply(x: Tensor) -> Tensor:
        return int4_linear(x, weight, bias)

    return apply


def _inputs_of_a_tile(weight: Int4Weight) -> int:
    """Return how many inputs have one scale and are unpacked at a time: 128, or less if groups are no multiple."""
    if weight.group_size % INT4_PAIRED:
        raise ValueError(f"A group has {weight.group_size} inputs; 4-bit products need a multiple of {INT4_PAIRED}.")
    return math.gcd(weight.group_size, 128)


def _gemm(row: str, dtype: str, block_k: int, splits: int, zeros: str | None) -> Specialisation:
    arguments = {
        "x_ptr": f"*{dtype}:16",
        "values_ptr": "*u8:16",
        "scales_ptr": f"*{dtype}:16",
        "zeros_ptr": zeros,
        "bias_ptr": None if splits == 1 else f"*{dtype}:16",
        "out_ptr": "*fp32:16" if splits == 1 else f"*{dtype}:16",
        "num_tokens": "i32",
        "out_features": "i32:16",
        "in_features": "i32:16",
        "group_size": "i32:16",
        "tiles_of_split": "i32",
        "SPLITS": splits,
        "BLOCK_K": block_k,
    }
    variant = f"{dtype} K={block_k} splits={splits}{' zeros' if zeros else ''}"
    return Specialisation(w4a16_kernel, row, arguments, hot=True, matrix=True, variant=variant)


SPECIALISATIONS = (
    *(
        _gemm(row, dtype, block_k, splits, zeros)
        for row in ("w4a16/16", "w4a16/64")
        for dtype, block_k, splits, zeros in (
            ("bf16", 128, 1, "*u8:16"),
            ("bf16", 128, 8, "*u8:16"),
            ("bf16", 64, 1, "*u8:16"),
            ("bf16", 32, 1, "*u8:16"),
            ("fp16", 128, 1, None),
        )
    ),
    *(
        Specialisation(
            dequantize_int4_kernel,
            "dequantize_int4",
            {
                "values_ptr": "*u8:16",
                "scales_ptr": f"*{dtype}:16",
                "zeros_ptr": "*u8:16",
                "out_ptr": f"*{dtype}:16",
                "out_features": "i32:16",
                "in_features": "i32:16",
                "group_size": "i32:16",
                "BLOCK_K": 128,
            },
            hot=True,
            variant=dtype,
        )
        for dtype in ("bf16", "fp16")
    ),
)
