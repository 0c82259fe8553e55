"""MXFP4 weights, as gpt-oss' checkpoints hold their experts: four bits a value, one scale for each 32 of a row.

A byte holds two values of the format E2M1, the first in its low half; a scale is the eight exponent bits of a power of
two. Format: OCP Microscaling Formats (MX) Specification 1.0.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# What each of the 256 bytes holds.
_PAIRS = torch.tensor([(_VALUES[byte & 0xF], _VALUES[byte >> 4]) for byte in range(256)])
_EXPONENT_SHIFT = 23
# 2**-127, the scale of exponent 0, is a subnormal float32.
_SMALLEST_SCALE = 1 << (_EXPONENT_SHIFT - 1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight `[out_features, in_features]` in `dtype`; bfloat16 and float32 hold each value exactly.

    blocks `[out_features, in_features / 32, 16]` uint8, scales `[out_features, in_features / 32]` uint8.
    """
    bits = scales.int() << _EXPONENT_SHIFT
    factors = bits.masked_fill_(scales == 0, _SMALLEST_SCALE).view(torch.float32)
    values = F.embedding(blocks.int(), _PAIRS.to(blocks.device)).view(*scales.shape, -1)
    return values.mul_(factors.unsqueeze(-1)).flatten(1).to(dtype)
