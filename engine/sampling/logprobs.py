"""Log-probabilities of tokens, as the model gave them: of the raw logits, before any stage of the sampler."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class TokenLogprobs(NamedTuple):
    """One position: the token that stands there, and the likeliest ones.

    `rank` is 1 plus the number of tokens that are likelier, so that of equals all have the same. `top` has
    `(token id, logprob)`, the likeliest first, of equals the lowest id.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def read_logprobs(
    token_ids: Sequence[int], num_top: Sequence[int], arrays: Sequence[np.ndarray]
) -> list[TokenLogprobs]:
    """The entries of R tokens, with `num_top` of the likeliest for each; `arrays` are `LogprobTensors`."""
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:count], tops[:count], strict=True)))
        for token_id, count, logprob, rank, tops, ids in zip(
            token_ids, num_top, *(array.tolist() for array in arrays), strict=True
        )
    ]
