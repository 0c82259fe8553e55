"""Linear layers whose weight has been laid out once for the machine that will multiply by it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Linear = Callable[[Tensor], Tensor]
"""`[num_tokens, in_features]` to `[num_tokens, out_features]`, in the weight's dtype."""


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return `x @ weight.T + bias` with the weight as it is; weight `[out_features, in_features]`."""

    def apply(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return apply
