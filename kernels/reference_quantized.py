"""Plain torch: the definition of right for products with quantised weights, and the layouts in which those lie.

`kernels.reference` has the rest, int8 included. Other implementations are tested against this file.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

INT4_RUN = 32
"""Inputs are packed in runs of so many: see `Int4Weight`."""
FLOAT8_BLOCK = 128
"""A scale of a float8 weight holds for so many outputs by so many inputs, one of an activation for so many inputs."""
_NIBBLES = 4
# What checkpoints without zero points mean: AWQ and GPTQ store -8 to 7 as 0 to 15.
INT4_SYMMETRIC_ZERO = 8
_FLOAT8_LARGEST = 448.0


class Int4Weight(NamedTuple):
    """A linear's weight in four bits, `w = (value - zero) * scale`: the one layout that checkpoints' are turned into.

    Of each 32 inputs, word i of eight holds inputs i, 8 + i, 16 + i and 24 + i, the first in its lowest four bits. So
    the words' lowest bits are of inputs that are contiguous in the activations, and so are the next: a kernel
    multiplies the four by themselves and never interleaves them. And it unpacks two words, as one of 32 bits, with one
    mask.

    values `[out_features, in_features / 4]` int16, of which the bits count. scales `[num_groups, out_features]` in a
    floating dtype, each for `in_features / num_groups` inputs, which is a multiple of 32. zeros, whole numbers from 0
    to 16, uint8 of the same shape; None stands for 8. Zeros stay whole numbers, rather than `-zero * scale`, because
    those round.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None

    @property
    def in_features(self) -> int:
        return _NIBBLES * self.values.shape[1]

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def group_size(self) -> int:
        return self.in_features // self.scales.shape[0]


def pack_int4(values: Tensor) -> Tensor:
    """Return values from 0 to 15, uint8 `[out_features, in_features]`, packed as `Int4Weight.values`."""
    parts = values.view(len(values), -1, _NIBBLES, INT4_RUN // _NIBBLES).int().unbind(2)
    words = parts[0] | parts[1] << 4 | parts[2] << 8 | parts[3] << 12
    return words.flatten(1).to(torch.int16)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return what `pack_int4` packed."""
    words = packed.view(len(packed), -1, INT4_RUN // _NIBBLES).int()
    parts = torch.stack([words >> 4 * place & 0xF for place in range(_NIBBLES)], dim=2)
    return parts.flatten(1).to(torch.uint8)


def quantize_int4(weight: Tensor, group_size: int) -> Int4Weight:
    """Return `weight`, `[out_features, in_features]`, rounded to 16 levels between the extremes of each group.

    Zero is among the levels. `group_size` is a multiple of 32 and divides `in_features`; scales are in the weight's
    dtype.
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    lowest, highest = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    # Levels are those of the scale as it is stored.
    scales = ((highest - lowest) / 15).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    zeros = (-lowest / scales.float()).round().clamp(0, 15)
    levels = (groups / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    values = levels.clamp(0, 15).to(torch.uint8).flatten(1)
    return Int4Weight(pack_int4(values), scales.T.contiguous(), zeros.to(torch.uint8).T.contiguous())


def dequantize_int4(weight: Int4Weight) -> Tensor:
    """Return the weight `[out_features, in_features]` in float32, exactly."""
    values = unpack_int4(weight.values).float().unflatten(1, (-1, weight.group_size))
    zeros = INT4_SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.T.unsqueeze(2).float()
    numbers: Tensor = (values - zeros) * weight.scales.T.unsqueeze(2).float()
    return numbers.flatten(1)


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in `x.dtype`, from float32 sums; x `[num_tokens, in_features]`."""
    return F.linear(x.float(), dequantize_int4(weight), None if bias is None else bias.float()).to(x.dtype)


class Float8Weight(NamedTuple):
    """A linear's weight in float8_e4m3fn with a scale for each block of 128 by 128, as DeepSeek's checkpoints have it.

    values `[out_features, in_features]` float8_e4m3fn; scales `[ceil(out_features / 128), ceil(in_features / 128)]`
    float32. `w = value * scale`.
    """

    values: Tensor
    scales: Tensor


def quantize_float8_weight(weight: Tensor) -> Float8Weight:
    """Return `weight`, `[out_features, in_features]`, in float8 with a scale for each block of 128 by 128."""
    out_features, in_features = weight.shape
    padded = F.pad(weight.float(), (0, -in_features % FLOAT8_BLOCK, 0, -out_features % FLOAT8_BLOCK))
    blocks = padded.unflatten(1, (-1, FLOAT8_BLOCK)).unflatten(0, (-1, FLOAT8_BLOCK))
    scales = _float8_scale(blocks.abs().amax((1, 3)))
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:out_features, :in_features]
    return Float8Weight(values.to(torch.float8_e4m3fn), scales)


def quantize_float8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, `[num_tokens, size]`, in float8_e4m3fn, and its scales, `[ceil(size / 128), num_tokens]` float32.

    A scale is a group's largest magnitude over 448, and a tiny normal number for a group of zeros.
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % FLOAT8_BLOCK)).unflatten(1, (-1, FLOAT8_BLOCK))
    scales = _float8_scale(groups.abs().amax(2))
    values = groups / scales.unsqueeze(2)
    return values.flatten(1)[:, : x.shape[1]].to(torch.float8_e4m3fn), scales.T.contiguous()


def _float8_scale(largest: Tensor) -> Tensor:
    return (largest / _FLOAT8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)


def dequantize_float8(weight: Float8Weight) -> Tensor:
    """Return the weight `[out_features, in_features]` in float32."""
    out_features, in_features = weight.values.shape
    by_output = weight.scales.repeat_interleave(FLOAT8_BLOCK, 0)[:out_features]
    return weight.values.float() * by_output.repeat_interleave(FLOAT8_BLOCK, 1)[:, :in_features]


def float8_linear(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in `x.dtype`, of x quantised by `quantize_float8_groups`; sums are float32."""
    values, scales = quantize_float8_groups(x)
    wide_x = values.float() * scales.T.repeat_interleave(FLOAT8_BLOCK, 1)[:, : x.shape[1]]
    return F.linear(wide_x, dequantize_float8(weight), None if bias is None else bias.float()).to(x.dtype)
