"""Log-probabilities of tokens, as the model gave them: of the raw logits, before any stage of the sampler."""

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """One position: the token that stands there, and the likeliest ones.

    `rank` counts from 1 the tokens that are at least as likely; `top` has `(token id, logprob)`, the likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
