"""The largest of each row of logits, and draws by Gumbel noise, in C++. See sampling.h."""

import torch
from torch import Tensor

from kernels import reference

_SERVED = (torch.bfloat16, torch.float32)


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.largest`."""
    if logits.dtype not in _SERVED:
        return reference.largest(logits)
    out: tuple[Tensor, Tensor] = torch.ops.pagemill_cpu.largest(logits)
    return out


def gumbel_argmax(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As `kernels.reference.gumbel_argmax`, token for token."""
    if logits.dtype not in _SERVED:
        logits = logits.float()
    tokens: Tensor
    tokens, sure = torch.ops.pagemill_cpu.gumbel_argmax(logits, temperatures, seeds, positions)
    # Two sums that rounding could put in either order: the definition's own arithmetic decides.
    for row in sure.logical_not().nonzero().flatten().split(1):
        tokens[row] = reference.gumbel_argmax(logits[row], temperatures[row], seeds[row], positions[row])
    return tokens
