"""Linear layers in 8-bit integers in C++: tokens are quantised, multiplied and scaled in one call."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import int8
from kernels.linear import Linear

_PANEL = 32


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """As `kernels.int8.int8_linear`. Other types than bfloat16 are torch's."""
    if weight.dtype != torch.bfloat16:
        return int8.int8_linear(weight, bias)
    out_features = weight.shape[0]
    values, scales = int8.quantize_weight(weight)
    packed = _packed(values)
    sums = _whole_panels(values.sum(dim=1, dtype=torch.int32))
    padded_scales = _whole_panels(scales)
    padded_bias = None if bias is None else _whole_panels(bias.float())

    def apply(x: Tensor) -> Tensor:
        out: Tensor = torch.ops.pagemill_cpu.int8_linear(x, packed, padded_scales, sums, padded_bias, out_features)
        return out

    return apply


def _packed(values: Tensor) -> Tensor:
    """Lay out `[out_features, in_features]` as `int8.h` reads it: `[out / 32, in / 4, 2, 16, 4]`."""
    padded = F.pad(values, (0, 0, 0, -len(values) % _PANEL))
    return padded.view(-1, 2, 16, padded.shape[1] // 4, 4).permute(0, 3, 1, 2, 4).contiguous()


def _whole_panels(x: Tensor) -> Tensor:
    return F.pad(x, (0, -len(x) % _PANEL))
