"""How the outputs of a product are dealt to panels, see `outputs.h`: by their number, or gates beside the ups."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.huge_pages import Arena

PANEL = 32
GATES = PANEL // 2
# A step reads all weights once. Measured: its products take 1 to 3 % less time than from pages of 4 KiB.
_WEIGHTS = Arena()


def zero_panels(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return room for a packed weight."""
    return _WEIGHTS.empty(prod(shape), dtype).zero_().view(shape)


def whole_panels(x: Tensor) -> Tensor:
    """Add zeros to `[out_features, ..]` until its panels are whole."""
    return _padded(x, PANEL)


def gates_beside_ups(x: Tensor) -> Tensor:
    """Deal `[2 * intermediate_size, ..]`, gate first, to panels of 16 gates and their ups, zeros in the last."""
    halves = [_padded(half, GATES).unflatten(0, (-1, GATES)) for half in x.split(len(x) // 2)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def _padded(x: Tensor, multiple: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % multiple))
