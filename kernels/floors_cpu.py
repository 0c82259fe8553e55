"""What top-k, top-p and min-p keep, on a CPU: of the likeliest tokens alone, where those are enough to tell."""

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kernels.reference_sampling import Limits

# Nearly always the tokens that reach top_p are among so many; sorting the whole vocabulary is for the other rows.
_TOP_P_CANDIDATES = 1024


class Draw(Protocol):
    def __call__(
        self, logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
    ) -> Tensor: ...


def draws_by(gumbel_argmax: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Draw:
    """Return `kernels.reference_sampling.draw`, made of what draws without limits. It overwrites float32 logits."""

    def draw(
        logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
    ) -> Tensor:
        if limits is not None:
            logits, temperatures = _restrict(logits.float(), temperatures, limits)
        return gumbel_argmax(logits, temperatures, seeds, positions)

    return draw


def _restrict(logits: Tensor, temperatures: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Put scores, and -inf where the limits drop a token, in place of the logits of rows that have limits.

    Returns the logits, and the temperatures that are left to be applied.
    """
    top_k, top_p, min_p = limits
    rows = (_restricts(top_k, logits) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    logits[rows] = _kept_scores(logits[rows], temperatures[rows], Limits(*(column[rows] for column in limits)))
    return logits, temperatures.index_fill(0, rows, 1)


def _restricts(top_k: Tensor, scores: Tensor) -> Tensor:
    return (top_k > 0) & (top_k < scores.shape[1])


def _kept_scores(logits: Tensor, temperatures: Tensor, limits: Limits) -> Tensor:
    # With the largest at 0, a temperature near 0 takes all others to -inf, and none to NaN.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    top_k, top_p, min_p = limits
    if len(rows := _restricts(top_k, scores).nonzero().squeeze(1)):
        _keep_from(scores, rows, top_k_floor(scores[rows], top_k[rows]))
    if len(rows := (top_p < 1).nonzero().squeeze(1)):
        _keep_from(scores, rows, top_p_floor(scores[rows], top_p[rows]))
    if len(rows := (min_p > 0).nonzero().squeeze(1)):
        _keep_from(scores, rows, min_p[rows].log())
    return scores


def _keep_from(scores: Tensor, rows: Tensor, floor: Tensor) -> None:
    kept = scores[rows]
    scores[rows] = kept.masked_fill_(kept < floor[:, None], -math.inf)


def top_k_floor(scores: Tensor, k: Tensor) -> Tensor:
    """Return the `k`-th largest score of each row, `[R]`; `k` is `[R]` int64, from 1 to the number of scores."""
    largest = scores.topk(int(k.max()), dim=-1).values
    return largest.gather(1, k[:, None] - 1).squeeze(1)


def top_p_floor(scores: Tensor, p: Tensor) -> Tensor:
    """Return, for each row, the smallest score among the likeliest whose probabilities reach `p` `[R]`."""
    candidates = scores.topk(min(_TOP_P_CANDIDATES, scores.shape[-1]), dim=-1).values
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    floor, reached = _floor_in_sorted(candidates, log_total, p)
    if not bool(reached.all()):
        rest = ~reached
        everything = scores[rest].sort(dim=-1, descending=True).values
        floor[rest], _ = _floor_in_sorted(everything, log_total[rest], p[rest])
    return floor


def _floor_in_sorted(scores: Tensor, log_total: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The floor in rows sorted in descending order, and whether the row's probabilities reach `p` at all."""
    probabilities = (scores - log_total).exp_()
    reach = probabilities.cumsum(dim=-1)
    # A token is kept if those before it do not reach p; the first always is.
    kept = (reach - probabilities < p[:, None]).sum(dim=-1).clamp_(min=1)
    return scores.gather(1, kept[:, None] - 1).squeeze(1), reach[:, -1] >= p
