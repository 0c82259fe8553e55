"""Linear layers whose weight has been laid out once for the machine that will multiply by it."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]
"""`[num_tokens, in_features]` to `[num_tokens, out_features]`, in the weight's dtype."""

# oneDNN chooses the packed layout for a batch of this many rows; measured good from 1 to 2048 rows.
_BATCH_HINT = 64


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return `x @ weight.T + bias` with the weight kept as it is; weight `[out_features, in_features]`."""

    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return apply


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return `x @ weight.T + bias` with the weight packed by oneDNN, or kept as it is where oneDNN cannot pack it."""
    if not _packs(weight.dtype):
        return plain_linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            # A row alone is summed in another order than the same row among others: give it company.
            return multiply(x.expand(2, -1))[:1]
        return multiply(x)

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    return apply


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Try whether this build of torch on this processor packs and multiplies weights of `dtype`."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        product = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(product, weight)
