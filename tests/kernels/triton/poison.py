"""Outputs that show what a kernel wrote, and what it left."""

import torch
from torch import Tensor

_INTEGER = 0x5A


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of NaN, or of 0x5a for integers."""
    value = float("nan") if dtype.is_floating_point else _INTEGER
    return torch.full(shape, value, dtype=dtype, device=device)


def is_poison(x: Tensor) -> Tensor:
    """Return where `x` still is as `poisoned` made it."""
    return x.isnan() if x.dtype.is_floating_point else x == _INTEGER
