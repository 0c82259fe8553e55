"""Log-probabilities of tokens, as the model gave them: of the raw logits, before any stage of the sampler."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """One position: the token that stands there, and the likeliest ones.

    `rank` is 1 plus the number of tokens that are likelier, so that of equals all have the same. `top` has
    `(token id, logprob)`, the likeliest first, of equals the lowest id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(log_probs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return what `log_probs` `[R, vocab_size]` say of one token of each row, and of the `num_top` likeliest."""
    chosen = log_probs.gather(1, torch.tensor(token_ids, device=log_probs.device)[:, None])
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    values, indices = likeliest(log_probs, max(num_top))
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], tops[:count], strict=True)))
        for token_id, logprob, rank, count, ids, tops in zip(
            token_ids, chosen[:, 0].tolist(), ranks.tolist(), num_top, indices.tolist(), values.tolist(), strict=True
        )
    ]


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of `scores` `[R, n]`, or all n, in falling order; of equals the first.

    Returns them and their indices, `[R, count]` each.
    """
    count = min(count, scores.shape[-1])
    values, indices = scores.topk(count, dim=-1)
    if count == 0:
        return values, indices
    # topk leaves open which of equals it takes, and in which order.
    floor = values[:, -1:]
    for row in ((scores >= floor).sum(dim=-1) > count).nonzero().flatten().tolist():
        candidates = (scores[row] >= floor[row]).nonzero().flatten()
        first = scores[row, candidates].argsort(descending=True, stable=True)[:count]
        indices[row] = candidates[first]
    indices = indices.sort(dim=-1).values
    values, order = scores.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(1, order)
