"""A mixture of experts from torch's own operations: tokens sorted by expert, each expert called once with all its own.

An expert's rows do not see each other and a token's experts are summed in the order of their numbers, so a token's
result depends on its neighbours no further than the experts' own products do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference import Expert


def mixture_of_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Sum each token's experts by their weights, as `kernels.reference.mixture_of_experts` defines it."""
    by_expert, order = expert_ids.flatten().sort(stable=True)
    counts = torch.bincount(by_expert, minlength=len(experts)).tolist()
    token_parts = (order // expert_ids.shape[1]).split(counts)
    share_parts = weights.flatten().index_select(0, order).unsqueeze(1).split(counts)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, shares in zip(experts, token_parts, share_parts, strict=True):
        if len(tokens):
            out.index_add_(0, tokens, expert(x.index_select(0, tokens)) * shares)
    return out.to(x.dtype)
