"""Weights in fewer bits, made when they are loaded: part by part, so that no float32 copy of a whole one is held."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import reference_quantized as reference
from kernels.reference_quantized import FLOAT8_BLOCK, INT4_SYMMETRIC_ZERO, Float8Weight, Int4Weight

LinearWeight = Tensor | Int4Weight | Float8Weight
"""A linear's weight as some `kernels.linear.Packers` take it."""

# A multiple of FLOAT8_BLOCK.
_ROWS_AT_A_TIME = 1024
_INT4_GROUP_SIZES = (128, 64, 32)


def int4_group_size(in_features: int) -> int | None:
    """Return how many inputs share a scale in a weight of four bits; None where no group that is served divides them.

    A weight of which that is so keeps its dtype.
    """
    return next((size for size in _INT4_GROUP_SIZES if in_features % size == 0), None)


def quantize_int4(weight: Tensor, group_size: int) -> Int4Weight:
    """Return `kernels.reference_quantized.quantize_int4` of `weight`, computed part by part."""
    return _join_int4([reference.quantize_int4(part, group_size) for part in weight.split(_ROWS_AT_A_TIME)])


def quantize_float8(weight: Tensor) -> Float8Weight:
    """Return `kernels.reference_quantized.quantize_float8_weight` of `weight`, computed part by part."""
    return _join_float8([reference.quantize_float8_weight(part) for part in weight.split(_ROWS_AT_A_TIME)])


def dequantize(weight: Int4Weight | Float8Weight) -> Tensor:
    """Return the weight `[out_features, in_features]` in float32."""
    if isinstance(weight, Int4Weight):
        return reference.dequantize_int4(weight)
    return reference.dequantize_float8(weight)


def join_neighbours(parts: Sequence[LinearWeight]) -> list[LinearWeight]:
    """Join weights of the same inputs along their outputs, in their order: mostly to one.

    Two of different kinds, or groups, stay apart, and so does what follows a float8 weight whose last block is not
    whole.
    """
    joined: list[LinearWeight] = []
    for part in parts:
        both = _join(joined[-1], part) if joined else None
        if both is None:
            joined.append(part)
        else:
            joined[-1] = both
    return joined


def _join(first: LinearWeight, second: LinearWeight) -> LinearWeight | None:
    if isinstance(first, Int4Weight) and isinstance(second, Int4Weight):
        same = first.group_size == second.group_size and first.scales.dtype == second.scales.dtype
        return _join_int4([first, second]) if same else None
    if isinstance(first, Float8Weight) and isinstance(second, Float8Weight):
        return _join_float8([first, second]) if len(first.values) % FLOAT8_BLOCK == 0 else None
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat((first, second))
    return None


def _join_int4(parts: list[Int4Weight]) -> Int4Weight:
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], dim=1)
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts], dim=1)
    return Int4Weight(values, scales, zeros)


def _join_float8(parts: list[Float8Weight]) -> Float8Weight:
    # As bytes, which every device can concatenate.
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    return Float8Weight(values.view(torch.float8_e4m3fn), torch.cat([part.scales for part in parts]))


def _zeros(weight: Int4Weight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, INT4_SYMMETRIC_ZERO, dtype=torch.uint8)
