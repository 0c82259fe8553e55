"""Products in float8_e4m3fn: a scale for each block of 128 by 128 of the weight, and for each token's 128 inputs.

Hopper's tensor cores keep some 14 bits of a sum of float8 products, and long sums show it: each tile of 128 inputs is
summed by itself, then scaled and added in float32 (as in DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

As in `kernels.triton.w4a16` the weight is the left operand, and the bits of a row do not depend on the rows beside it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear import Linear
from kernels.reference_quantized import FLOAT8_BLOCK, Float8Weight
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.split_k import empty_partials, fills_card, num_splits, sum_splits

# Tokens of a tile, by row of the launch table.
_TOKENS_OF_A_TILE = (16, 64, 128)
# Tiles of tokens that are multiplied by one tile of the weight after the other, so that both stay in the L2 cache.
_SWIZZLED: tl.constexpr = tl.constexpr(8)
_BLOCK: tl.constexpr = tl.constexpr(FLOAT8_BLOCK)


@triton.jit(do_not_specialize=["num_tokens"])
def quantize_float8_kernel(x_ptr, values_ptr, scales_ptr, num_tokens, size, BLOCK_M: tl.constexpr):
    """Quantise 128 inputs of some tokens; the grid is (tiles of tokens, groups of inputs)."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    places = group * _BLOCK + tl.arange(0, _BLOCK)
    inside = (tokens < num_tokens)[:, None] & (places < size)[None, :]
    at = tokens.to(tl.int64)[:, None] * size + places[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full((BLOCK_M,), 448.0, tl.float32)), 1.1754944e-38)
    values = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
    tl.store(values_ptr + at, values.to(values_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + group * num_tokens + tokens, scales, mask=tokens < num_tokens)


def quantize_float8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, `[num_tokens, size]` contiguous, in float8_e4m3fn, and its scales `[ceil(size / 128), num_tokens]`.

    As `kernels.reference_quantized.quantize_float8_groups`, bit for bit. Raises `LookupError` below sm_89.
    """
    launch = launch_for("quantize_float8", x.device)
    groups = triton.cdiv(x.shape[1], FLOAT8_BLOCK)
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((groups, len(x)), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(len(x), launch.meta["BLOCK_M"]), groups)
    quantize_float8_kernel[grid](x, values, scales, len(x), x.shape[1], **launch.options)
    return values, scales


@triton.jit(do_not_specialize=["num_tokens"])
def float8_kernel(
    x_ptr,
    x_scales_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    tiles_of_split,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write `[num_tokens, out_features]`, or with a second grid axis above one, each split's part of it in float32.

    The grid is (tiles of outputs and tokens, splits that are not summed here). `BLOCK_N` divides 128.
    """
    row_tiles, column_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    index = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(
        index // column_tiles, index % column_tiles, row_tiles, column_tiles, _SWIZZLED
    )
    outputs = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_token = outputs < out_features, tokens < num_tokens
    places = tl.arange(0, _BLOCK)
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * in_features + places[None, :]
    value_rows = values_ptr + outputs.to(tl.int64)[:, None] * in_features + places[None, :]
    k_tiles = tl.cdiv(in_features, _BLOCK)
    scale_row = scales_ptr + column_tile * BLOCK_N // _BLOCK * k_tiles

    first = tl.program_id(1) * tiles_of_split
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for split in range(SPLITS):
        start = first + split * tiles_of_split
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for tile in range(start, tl.minimum(start + tiles_of_split, k_tiles)):
            x_inside, value_inside = is_token[:, None], is_output[:, None]
            if not EVEN_K:
                is_input = (places < in_features - tile * _BLOCK)[None, :]
                x_inside, value_inside = x_inside & is_input, value_inside & is_input
            x = tl.load(x_rows + tile * _BLOCK, mask=x_inside, other=0.0)
            values = tl.load(value_rows + tile * _BLOCK, mask=value_inside, other=0.0)
            scales = tl.load(x_scales_ptr + tile * num_tokens + tokens, mask=is_token, other=0.0)
            part += tl.dot(values, tl.trans(x)) * (scales * tl.load(scale_row + tile))[None, :]
        total += part

    inside = is_token[:, None] & is_output[None, :]
    row = tl.program_id(1).to(tl.int64) * num_tokens + tokens
    out = tl.trans(total)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + row[:, None] * out_features + outputs[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


def float8_linear(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in `x.dtype`, as `kernels.reference_quantized.float8_linear` defines it.

    x `[num_tokens, in_features]`, contiguous; bias `[out_features]`. Raises `LookupError` below sm_89.
    """
    out_features, in_features = weight.values.shape
    tokens = next((tokens for tokens in _TOKENS_OF_A_TILE if len(x) <= tokens), _TOKENS_OF_A_TILE[-1])
    launch = launch_for(f"float8/{tokens}", x.device)
    k_tiles = triton.cdiv(in_features, FLOAT8_BLOCK)
    splits = num_splits(out_features, k_tiles)
    row_tiles = triton.cdiv(len(x), launch.meta["BLOCK_M"])
    apart = 1 if fills_card(out_features, row_tiles) else splits
    values, scales = quantize_float8_groups(x)
    out = torch.empty((len(x), out_features), dtype=x.dtype, device=x.device)
    target = out if apart == 1 else empty_partials(x, splits, out_features)
    grid = (row_tiles * triton.cdiv(out_features, launch.meta["BLOCK_N"]), apart)
    float8_kernel[grid](
        values,
        scales,
        *weight,
        bias if apart == 1 else None,
        target,
        len(x),
        out_features,
        in_features,
        triton.cdiv(k_tiles, splits),
        SPLITS=splits // apart,
        EVEN_K=in_features % FLOAT8_BLOCK == 0,
        **launch.options,
    )
    if apart > 1:
        sum_splits(target, bias, out)
    return out


def pack_float8_linear(weight: Float8Weight, bias: Tensor | None) -> Linear:
    """Return `float8_linear` of one weight."""

    def apply(x: Tensor) -> Tensor:
        return float8_linear(x, weight, bias)

    return apply


def _gemm(tokens: int, dtype: str, splits: int, *, even_k: bool, alone: bool) -> Specialisation:
    arguments = {
        "x_ptr": "*fp8e4nv:16",
        "x_scales_ptr": "*fp32:16",
        "values_ptr": "*fp8e4nv:16",
        "scales_ptr": "*fp32:16",
        "bias_ptr": f"*{dtype}:16" if alone else None,
        "out_ptr": f"*{dtype}:16" if alone else "*fp32:16",
        "num_tokens": "i32",
        "out_features": "i32:16",
        "in_features": "i32:16",
        "tiles_of_split": "i32",
        "SPLITS": splits,
        "EVEN_K": even_k,
    }
    variant = f"{dtype if alone else 'fp32'} splits={splits}{'' if even_k else ' odd K'}"
    return Specialisation(
        float8_kernel, f"float8/{tokens}", arguments, hot=True, matrix=True, float8=True, variant=variant
    )


SPECIALISATIONS = (
    *(
        _gemm(tokens, dtype, splits, even_k=even_k, alone=alone)
        for tokens in _TOKENS_OF_A_TILE
        for dtype, splits, even_k, alone in (
            ("bf16", 1, True, True),
            ("bf16", 1, True, False),
            ("bf16", 8, True, True),
            ("bf16", 1, False, True),
            ("fp16", 1, True, True),
        )
    ),
    *(
        Specialisation(
            quantize_float8_kernel,
            "quantize_float8",
            {
                "x_ptr": f"*{dtype}:16",
                "values_ptr": "*fp8e4nv:16",
                "scales_ptr": "*fp32:16",
                "num_tokens": "i32",
                "size": "i32:16",
            },
            hot=True,
            float8=True,
            variant=dtype,
        )
        for dtype in ("bf16", "fp16")
    ),
)
