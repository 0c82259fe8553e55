"""Log-probabilities of tokens, as the model gave them: of the raw logits, before any stage of the sampler."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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


class LogprobTensors(NamedTuple):
    """What is known of R tokens, on the device."""

    chosen: Tensor  # [R] float32
    ranks: Tensor  # [R] int64
    top_values: Tensor  # [R, count] float32
    top_token_ids: Tensor  # [R, count] int64


def compute_logprobs(log_probs: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Return what `log_probs` `[R, vocab_size]` say of one token of each row, `[R]`, and of the `num_top` likeliest."""
    chosen = log_probs.gather(1, token_ids[:, None])
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    return LogprobTensors(chosen[:, 0], ranks, *likeliest(log_probs, num_top))


def read_logprobs(
    token_ids: Sequence[int], num_top: Sequence[int], arrays: Sequence[np.ndarray]
) -> list[TokenLogprobs]:
    """The entries of R tokens, with `num_top` of the likeliest for each; `arrays` are those of `LogprobTensors`."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], tops[:count], strict=True)))
        for token_id, count, logprob, rank, tops, ids in zip(
            token_ids, num_top, *(array.tolist() for array in arrays), strict=True
        )
    ]


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of `scores` `[R, n]`, or all n, in falling order; of equals the first.

    Returns them and their indices, `[R, count]` each. Of a row with a NaN they may be any.
    """
    count = min(count, scores.shape[-1])
    values, indices = scores.topk(count, dim=-1)
    if count == 0:
        return values, indices
    # topk leaves open which of equals it takes, and in which order.
    choose = first_of_equals_on_cpu if scores.device.type == "cpu" else first_of_equals
    indices = choose(scores, values[:, -1:], indices).sort(dim=-1).values
    values, order = scores.gather(1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(1, order)


def first_of_equals_on_cpu(scores: Tensor, floor: Tensor, indices: Tensor) -> Tensor:
    """What `first_of_equals` returns, with work only for the rows in which more tokens reach the floor than fit."""
    count = indices.shape[1]
    for row in ((scores >= floor).sum(dim=-1) > count).nonzero().flatten().tolist():
        candidates = (scores[row] >= floor[row]).nonzero().flatten()
        first = scores[row, candidates].argsort(descending=True, stable=True)[:count]
        indices[row] = candidates[first]
    return indices


def first_of_equals(scores: Tensor, floor: Tensor, indices: Tensor) -> Tensor:
    """The indices of as many scores as `indices` `[R, count]` has, from the largest on; of equals the first.

    `floor` `[R, 1]` is the smallest of them. No shape depends on the scores, so that the host does not wait for them.
    """
    count, size = indices.shape[1], scores.shape[1]
    above, ties = scores > floor, scores == floor
    room = count - above.sum(dim=-1, keepdim=True)
    chosen = above | (ties & (ties.cumsum(dim=-1) <= room))
    # Exactly `count` are chosen, unless there is a NaN; the largest of these numbers stand for the first of them.
    from_the_end = torch.arange(size, 0, -1, device=scores.device)
    return (size - torch.where(chosen, from_the_end, 0).topk(count, dim=-1).values).clamp_(max=size - 1)
