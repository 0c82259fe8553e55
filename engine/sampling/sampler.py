"""From logits to tokens, in this order:

    1  grammar             to -inf: what may not follow
    2  biases              logit_bias is added
    3  allowed tokens      to -inf: all others
    4  penalties           repetition_penalty, then frequency_penalty and presence_penalty
    5  banned tokens       to -inf: what would end a request before its min_tokens, and what would complete a bad word
    6  temperature         0: the likeliest token, of equals the one with the lowest id, and nothing of what follows
    7  top_k               keep the k likeliest
    8  top_p               of those, the likeliest that together reach p
    9  min_p               of those, the ones at least min_p times as likely as the likeliest
    10 Gumbel-max          add noise, take the largest: a draw from what was kept, in proportion

Logprobs are of the logits before the first stage. Stages 7 to 9 keep all tokens whose logits are equal to the last one
kept, so that what is kept is a function of the logits and not of a sorting order. The noise of a token is a function of
(seed, position, vocabulary id), so that a request draws the same whatever else is in the batch. Where a row's logits
are not finite, or every token is ruled out, there is no token.

The rows of beam search do not draw: stages 1 to 5 are applied to their log-probabilities, as Transformers does, and the
likeliest tokens are handed on.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.batch import SamplingBatch
from engine.plan import Sampled
from engine.sampling.logprobs import likeliest, token_logprobs
from engine.sampling.token_rules import apply_edits
from kernels.bitmask import apply_token_bitmask
from kernels.ops import kernels_for

# Nearly always the tokens that reach top_p are among so many; sorting the whole vocabulary is for the other rows.
_TOP_P_CANDIDATES = 1024


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Sampled, ...]:
    """Choose one token for each row of `logits` `[R, vocab_size]`, which may be overwritten.

    There is none for a row whose largest logit is NaN or infinite.
    """
    rows_with_logprobs, beams = list(batch.num_logprobs), list(batch.num_candidates)
    log_probs = torch.log_softmax(logits[rows_with_logprobs].float(), dim=-1) if rows_with_logprobs else None
    if beams or batch.grammar or batch.edits:
        logits = logits.float()
    if beams:
        logits[beams] = torch.log_softmax(logits[beams], dim=-1)
    if batch.grammar:
        apply_token_bitmask(logits, batch.grammar.bitmask, batch.grammar.rows)
    if batch.edits:
        apply_edits(logits, batch.edits)
    best, tokens = kernels_for(logits.device).largest(logits)
    random_rows = [row for row, temperature in enumerate(batch.temperature) if temperature > 0]
    if len(random_rows) == len(batch.temperature):
        tokens = _sample_random(logits, batch)
    elif random_rows:
        tokens[random_rows] = _sample_random(logits[random_rows], _select(batch, random_rows))
    sampled = [
        Sampled(token if math.isfinite(score) else None, all_ruled_out=score == -math.inf)
        for token, score in zip(tokens.tolist(), best.tolist(), strict=True)
    ]
    if log_probs is not None:
        _attach_logprobs(sampled, log_probs, batch.num_logprobs)
    if beams:
        _attach_candidates(sampled, logits[beams], batch.num_candidates)
    return tuple(sampled)


def _attach_logprobs(sampled: list[Sampled], log_probs: Tensor, num_logprobs: Mapping[int, int]) -> None:
    """`log_probs` are those of the rows that `num_logprobs` names."""
    # A row without a token is given up whole, so that it does not matter which one stands in for it here.
    token_ids = [sampled[row].token_id or 0 for row in num_logprobs]
    for row, logprobs in zip(
        num_logprobs, token_logprobs(log_probs, token_ids, list(num_logprobs.values())), strict=True
    ):
        sampled[row] = sampled[row]._replace(logprobs=logprobs)


def _attach_candidates(sampled: list[Sampled], scores: Tensor, num_candidates: Mapping[int, int]) -> None:
    """`scores` are those of the rows that `num_candidates` names."""
    values, token_ids = likeliest(scores, max(num_candidates.values()))
    for (row, count), ids, logprobs in zip(num_candidates.items(), token_ids.tolist(), values.tolist(), strict=True):
        candidates = tuple(zip(ids[:count], logprobs[:count], strict=True))
        sampled[row] = sampled[row]._replace(candidates=candidates)


def _sample_random(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Stages 6 to 10 for rows of logits; returns token ids `[R]`."""
    limits = torch.finfo(torch.float32)
    # An infinite temperature would take to NaN what is -inf.
    temperatures = _like(logits, batch.temperature, torch.float32).clamp_(limits.tiny, limits.max)
    vocab_size = logits.shape[-1]
    restricted = [
        row
        for row, (k, p, min_p) in enumerate(zip(batch.top_k, batch.top_p, batch.min_p, strict=True))
        if 0 < k < vocab_size or p < 1 or min_p > 0
    ]
    if restricted:
        logits = logits.float()
        logits[restricted] = _restrict(logits[restricted], temperatures[restricted], _select(batch, restricted))
        temperatures[restricted] = 1
    seeds, positions = _like(logits, batch.seeds, torch.int64), _like(logits, batch.positions, torch.int64)
    return kernels_for(logits.device).gumbel_argmax(logits, temperatures, seeds, positions)


def _restrict(logits: Tensor, temperatures: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the logits, each less its row's largest, over the temperature, and -inf where stages 7 to 9 drop it."""
    # With the largest at 0, a temperature near 0 takes all others to -inf, and none to NaN.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    if rows := [row for row, k in enumerate(batch.top_k) if 0 < k < scores.shape[-1]]:
        k = _like(scores, [batch.top_k[row] for row in rows], torch.int64)
        _keep_from(scores, rows, top_k_floor(scores[rows], k))
    if rows := [row for row, p in enumerate(batch.top_p) if p < 1]:
        p = _like(scores, [batch.top_p[row] for row in rows], torch.float32)
        _keep_from(scores, rows, top_p_floor(scores[rows], p))
    if rows := [row for row, p in enumerate(batch.min_p) if p > 0]:
        _keep_from(scores, rows, _like(scores, [batch.min_p[row] for row in rows], torch.float32).log_())
    return scores


def _like(tensor: Tensor, values: list, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=tensor.device)


def top_k_floor(scores: Tensor, k: Tensor) -> Tensor:
    """Return the `k`-th largest score of each row, `[R]`; `k` is `[R]` int64, from 1 to the row's length."""
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


def _keep_from(scores: Tensor, rows: list[int], floor: Tensor) -> None:
    kept = scores[rows]
    scores[rows] = kept.masked_fill_(kept < floor[:, None], -math.inf)


def _select(batch: SamplingBatch, rows: list[int]) -> SamplingBatch:
    return SamplingBatch(
        temperature=[batch.temperature[row] for row in rows],
        top_k=[batch.top_k[row] for row in rows],
        top_p=[batch.top_p[row] for row in rows],
        min_p=[batch.min_p[row] for row in rows],
        seeds=[batch.seeds[row] for row in rows],
        positions=[batch.positions[row] for row in rows],
    )
