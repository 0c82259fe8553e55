"""Linear layers in 8-bit integers (W8A8): a scale for each output of a weight, and for each token as it comes.

Weights are quantised when they are packed, from whatever the checkpoint holds, and symmetrically: there is no zero
point. Activations are quantised row by row, so that a token has the same result whatever shares its batch. Both are
turned first, see `kernels.reference.turn_blocks`: with SmolLM2 that takes three quarters of the KL divergence away.
"""

from functools import cache

import torch
from torch import Tensor

from kernels import reference
from kernels.linear import Linear

# Of a weight that is quantised at a time: the float32 copy of all of a large one would be most of the peak of loading.
_ROWS_AT_A_TIME = 1024


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `kernels.reference.quantize_weight` of `weight`, computed part by part."""
    in_features = weight.shape[1] + -weight.shape[1] % reference.TURNED_BLOCK
    values = torch.empty((len(weight), in_features), dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for part, *targets in zip(*(x.split(_ROWS_AT_A_TIME) for x in (weight, values, scales)), strict=True):
        for target, quantized in zip(targets, reference.quantize_weight(part), strict=True):
            target.copy_(quantized)
    return values, scales


def int8_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return `kernels.reference.int8_linear` of the weight quantised, `[out_features, in_features]`.

    By torch's own product of int8 matrices where that is exact: oneDNN's saturates on processors without VNNI.
    """
    values, weight_scales = quantize_weight(weight)
    wide_bias = None if bias is None else bias.float()

    def apply(x: Tensor) -> Tensor:
        if not _multiplies_exactly():
            return reference.int8_linear(x, values, weight_scales, wide_bias)
        rows, scales = reference.quantize_rows(x)
        products = torch._int_mm(rows, values.T)
        return reference.scaled_products(products, scales, weight_scales, wide_bias).to(x.dtype)

    return apply


@cache
def _multiplies_exactly() -> bool:
    """Try the largest products that there are, which are where sums of 16 bits overflow."""
    x = torch.full((32, 64), 127, dtype=torch.int8)
    products = torch._int_mm(x, x.T), torch._int_mm(x, -x.T)
    return all(bool((product.abs() == 64 * 127 * 127).all()) for product in products)
