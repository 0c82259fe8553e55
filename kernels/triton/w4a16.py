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

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Linear
from kernels.reference_quantized import INT4_RUN, Int4Weight
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.split_k import empty_partials, fills_card, num_splits, sum_splits

DEQUANTIZE_ABOVE = 256
"""Rows above which unpacking all of the weight, 4.5 bytes of traffic for each number, costs less than unpacking its
tiles once for every 64 rows."""

_FEW_TOKENS = 16


# Two words of 16 bits, in one register, to the four numbers of each: 0xEA is (a & b) | c.
_UNPACK = """
    {{
    .reg .b32 word;
    lop3.b32 $0, $4, 0x000F000F, {one}, 0xEA;
    shr.u32 word, $4, 4;
    lop3.b32 $1, word, 0x000F000F, {one}, 0xEA;
    shr.u32 word, $4, 8;
    lop3.b32 $2, word, 0x000F000F, {one}, 0xEA;
    shr.u32 word, $4, 12;
    lop3.b32 $3, word, 0x000F000F, {one}, 0xEA;
    }}
"""
_UNPACK_BFLOAT16: tl.constexpr = tl.constexpr(_UNPACK.format(one="0x43004300"))
_UNPACK_FLOAT16: tl.constexpr = tl.constexpr(_UNPACK.format(one="0x64006400"))


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """Return the four numbers of each word, the lowest first, as `DTYPE`, raised as by `_raised`.

    In Triton's own operations each number would have a register to itself: more instructions than there is time for
    while the next words arrive.
    """
    first, second, third, fourth = tl.inline_asm_elementwise(
        asm=_UNPACK_BFLOAT16 if DTYPE == tl.bfloat16 else _UNPACK_FLOAT16,
        constraints="=r,=r,=r,=r,r",
        args=[words],
        dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16),
        is_pure=True,
        pack=2,
    )
    return (
        first.to(DTYPE, bitcast=True),
        second.to(DTYPE, bitcast=True),
        third.to(DTYPE, bitcast=True),
        fourth.to(DTYPE, bitcast=True),
    )


@triton.jit
def _raised(small, DTYPE: tl.constexpr):
    """Return integers below 128 as `DTYPE`, with 128 (bfloat16) or 1024 (float16) added."""
    bits: tl.constexpr = 0x4300 if DTYPE == tl.bfloat16 else 0x6400
    return (small.to(tl.uint16) | bits).to(DTYPE, bitcast=True)


@triton.jit
def _zeros(zeros_ptr, places, inside, DTYPE: tl.constexpr):
    """Return a group's zeros, raised as what `_unpack` returns is: their difference is exact."""
    if zeros_ptr is None:
        return _raised(tl.full(places.shape, 8, tl.uint8), DTYPE)
    else:
        return _raised(tl.load(zeros_ptr + places, mask=inside, other=0), DTYPE)


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
    tiles_of_split,
    SPLITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write `[num_tokens, out_features]`, or with a second grid axis above one, each split's part of it in float32.

    The grid is (tiles of outputs, splits that are not summed here, tiles of tokens). Where `BLOCK_K` does not divide
    `GROUP_SIZE`, each run of 32 inputs is multiplied by itself, with zeros in place of the rest of x's tile.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORDS: tl.constexpr = BLOCK_K // 4
    PARTS: tl.constexpr = 1 if GROUP_SIZE % BLOCK_K == 0 else BLOCK_K // 32
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_token = outputs < out_features, tokens < num_tokens
    words = tl.arange(0, WORDS)
    # Where the lowest numbers of these words lie in a row of x; see `Int4Weight`.
    places = words // 8 * 32 + words % 8
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * in_features + places[None, :]
    value_rows = values_ptr + outputs.to(tl.int64)[:, None] * (in_features // 4) + words[None, :]
    k_tiles = tl.cdiv(in_features, BLOCK_K)

    first = tl.program_id(1) * tiles_of_split
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for split in range(SPLITS):
        start = first + split * tiles_of_split
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for tile in range(start, tl.minimum(start + tiles_of_split, k_tiles)):
            is_word = is_output[:, None]
            if PARTS > 1:
                is_word = is_word & (tile * WORDS + words < in_features // 4)[None, :]
            packed = tl.load(value_rows + tile * WORDS, mask=is_word, other=0)
            w0, w1, w2, w3 = _unpack(packed, DTYPE)
            for part in tl.static_range(PARTS):
                is_x = is_token[:, None]
                if PARTS > 1:
                    is_x = is_x & ((words // 8 == part) & (tile * BLOCK_K + places < in_features))[None, :]
                x = x_rows + tile * BLOCK_K
                x0 = tl.trans(tl.load(x, mask=is_x, other=0.0))
                x1 = tl.trans(tl.load(x + 8, mask=is_x, other=0.0))
                x2 = tl.trans(tl.load(x + 16, mask=is_x, other=0.0))
                x3 = tl.trans(tl.load(x + 24, mask=is_x, other=0.0))
                group = (tile * BLOCK_K + part * 32) // GROUP_SIZE
                is_scale = is_output if PARTS == 1 else is_output & (group * GROUP_SIZE < in_features)
                at = group * out_features + outputs
                scales = tl.load(scales_ptr + at, mask=is_scale, other=0.0).to(tl.float32)
                zeros = _zeros(zeros_ptr, at, is_scale, DTYPE)[:, None]
                products = tl.dot(w0 - zeros, x0)
                products = tl.dot(w1 - zeros, x1, products)
                products = tl.dot(w2 - zeros, x2, products)
                products = tl.dot(w3 - zeros, x3, products)
                sums += products * scales[:, None]
        total += sums

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
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the weight, `[out_features, in_features]`, rounded once from float32; a program has one run of inputs."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    run = tl.program_id(1)
    is_output = (outputs < out_features)[:, None]
    words = tl.arange(0, 8)[None, :]
    rows = outputs.to(tl.int64)[:, None]
    packed = tl.load(values_ptr + rows * (in_features // 4) + run * 8 + words, mask=is_output, other=0)
    at = run * 32 // GROUP_SIZE * out_features + outputs[:, None]
    scales = tl.load(scales_ptr + at, mask=is_output, other=0.0).to(tl.float32)
    zeros = _zeros(zeros_ptr, at, is_output, DTYPE).to(tl.float32)
    w0, w1, w2, w3 = _unpack(packed, DTYPE)
    to = out_ptr + rows * in_features + run * 32 + words
    tl.store(to, ((w0.to(tl.float32) - zeros) * scales).to(DTYPE), mask=is_output)
    tl.store(to + 8, ((w1.to(tl.float32) - zeros) * scales).to(DTYPE), mask=is_output)
    tl.store(to + 16, ((w2.to(tl.float32) - zeros) * scales).to(DTYPE), mask=is_output)
    tl.store(to + 24, ((w3.to(tl.float32) - zeros) * scales).to(DTYPE), mask=is_output)


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight, `[out_features, in_features]`, rounded to `dtype`, bfloat16 or float16."""
    launch = launch_for("dequantize_int4", weight.values.device)
    out = torch.empty((weight.out_features, weight.in_features), dtype=dtype, device=weight.values.device)
    grid = (triton.cdiv(weight.out_features, launch.meta["BLOCK_N"]), weight.in_features // INT4_RUN)
    dequantize_int4_kernel[grid](
        *weight, out, weight.out_features, weight.in_features, GROUP_SIZE=weight.group_size, **launch.options
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
    k_tiles = triton.cdiv(weight.in_features, block_k)
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
        triton.cdiv(k_tiles, splits),
        SPLITS=splits // apart,
        GROUP_SIZE=weight.group_size,
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
    if weight.group_size % INT4_RUN:
        raise ValueError(f"A group has {weight.group_size} inputs; 4-bit products need a multiple of {INT4_RUN}.")
    return 128 if weight.group_size % 128 == 0 else 64


def _gemm(row: str, dtype: str, group_size: int, splits: int, *, zeros: bool) -> Specialisation:
    arguments = {
        "x_ptr": f"*{dtype}:16",
        "values_ptr": "*i16:16",
        "scales_ptr": f"*{dtype}:16",
        "zeros_ptr": "*u8:16" if zeros else None,
        "bias_ptr": None if splits == 1 else f"*{dtype}:16",
        "out_ptr": "*fp32:16" if splits == 1 else f"*{dtype}:16",
        "num_tokens": "i32",
        "out_features": "i32:16",
        "in_features": "i32:16",
        "tiles_of_split": "i32",
        "SPLITS": splits,
        "GROUP_SIZE": group_size,
        "BLOCK_K": 128 if group_size % 128 == 0 else 64,
    }
    variant = f"{dtype} group={group_size} splits={splits}{' zeros' if zeros else ''}"
    return Specialisation(w4a16_kernel, row, arguments, hot=True, matrix=True, variant=variant)


def _dequantize(dtype: str) -> Specialisation:
    arguments = {
        "values_ptr": "*i16:16",
        "scales_ptr": f"*{dtype}:16",
        "zeros_ptr": "*u8:16",
        "out_ptr": f"*{dtype}:16",
        "out_features": "i32:16",
        "in_features": "i32:16",
        "GROUP_SIZE": 128,
    }
    return Specialisation(dequantize_int4_kernel, "dequantize_int4", arguments, hot=True, variant=dtype)


SPECIALISATIONS = (
    *(
        _gemm(row, dtype, group_size, splits, zeros=zeros)
        for row in ("w4a16/16", "w4a16/64")
        for dtype, group_size, splits, zeros in (
            ("bf16", 128, 1, True),
            ("bf16", 128, 8, True),
            ("bf16", 64, 1, True),
            ("bf16", 32, 1, True),
            ("fp16", 128, 1, False),
        )
    ),
    _dequantize("bf16"),
    _dequantize("fp16"),
)
