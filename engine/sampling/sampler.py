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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import SamplingBatch
from engine.device import Device
from engine.plan import Sampled
from engine.sampling.logprobs import LogprobTensors, compute_logprobs, likeliest, read_logprobs
from engine.sampling.token_rules import apply_edits
from kernels.bitmask import apply_token_bitmask
from kernels.ops import kernels_for

# Nearly always the tokens that reach top_p are among so many; sorting the whole vocabulary is for the other rows.
_TOP_P_CANDIDATES = 1024


class Draws(NamedTuple):
    """What was drawn for R rows of logits, on the device.

    Attributes:
        token_ids: `[R]` int64; of a row without a token, any of the vocabulary.
        best: `[R]` float32, the largest logit. There is no token where it is NaN or infinite.
        logprobs: Of the rows that want them, in order; None if none does.
        candidates: Of the rows of beam search, in order: log-probabilities and token ids, the likeliest first.
    """

    token_ids: Tensor
    best: Tensor
    logprobs: LogprobTensors | None
    candidates: tuple[Tensor, Tensor] | None

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `read_draws` takes them."""
        return [self.token_ids, self.best, *(self.logprobs or ()), *(self.candidates or ())]


def sample(logits: Tensor, batch: SamplingBatch, device: Device) -> Draws:
    """Choose one token for each row of `logits` `[R, vocab_size]`, which may be overwritten.

    The host never waits for the device: what branches depend on is in the lists of `batch`.
    """
    log_probs = None
    if batch.num_logprobs:
        wanted = _rows(device, batch.num_logprobs)
        log_probs = torch.log_softmax(logits[wanted].float(), dim=-1)
    if batch.num_candidates or batch.grammar or batch.edits:
        logits = logits.float()
    if batch.num_candidates:
        beams = _rows(device, batch.num_candidates)
        logits[beams] = torch.log_softmax(logits[beams], dim=-1)
    if batch.grammar:
        apply_token_bitmask(logits, batch.grammar.bitmask, batch.grammar.rows)
    if batch.edits:
        apply_edits(logits, batch.edits)
    best, token_ids = kernels_for(logits.device).largest(logits)
    random_rows = [row for row, temperature in enumerate(batch.temperature) if temperature > 0]
    if len(random_rows) == len(batch.temperature):
        token_ids = _sample_random(logits, batch, device)
    elif random_rows:
        places = _rows(device, random_rows)
        token_ids[places] = _sample_random(logits[places], _select(batch, random_rows), device)
    return Draws(
        token_ids,
        best,
        None if log_probs is None else compute_logprobs(log_probs, token_ids[wanted], max(batch.num_logprobs.values())),
        likeliest(logits[beams], max(batch.num_candidates.values())) if batch.num_candidates else None,
    )


def read_draws(batch: SamplingBatch, arrays: Sequence[np.ndarray]) -> list[Sampled]:
    """What was drawn, row by row; `arrays` are the tensors of its `Draws`, on the host."""
    token_ids, best, *others = arrays
    sampled = [
        Sampled(token_id if math.isfinite(score) else None, all_ruled_out=score == -math.inf)
        for token_id, score in zip(token_ids.tolist(), best.tolist(), strict=True)
    ]
    if batch.num_logprobs:
        logprobs, others = others[: len(LogprobTensors._fields)], others[len(LogprobTensors._fields) :]
        drawn = token_ids[list(batch.num_logprobs)].tolist()
        entries = read_logprobs(drawn, list(batch.num_logprobs.values()), logprobs)
        for row, entry in zip(batch.num_logprobs, entries, strict=True):
            sampled[row] = sampled[row]._replace(logprobs=entry)
    if batch.num_candidates:
        values, ids = (array.tolist() for array in others)
        for (row, count), row_ids, row_values in zip(batch.num_candidates.items(), ids, values, strict=True):
            candidates = tuple(zip(row_ids[:count], row_values[:count], strict=True))
            sampled[row] = sampled[row]._replace(candidates=candidates)
    return sampled


def _rows(device: Device, rows: Iterable[int]) -> Tensor:
    (places,) = device.upload(np.array(list(rows), dtype=np.int64))
    return places


def _sample_random(logits: Tensor, batch: SamplingBatch, device: Device) -> Tensor:
    """Stages 6 to 10 for rows of logits; returns token ids `[R]`."""
    limits = torch.finfo(torch.float32)
    # An infinite temperature would take to NaN what is -inf.
    temperatures = np.clip(np.array(batch.temperature), limits.tiny, limits.max).astype(np.float32)
    vocab_size = logits.shape[-1]
    restricted = [
        row
        for row, (k, p, min_p) in enumerate(zip(batch.top_k, batch.top_p, batch.min_p, strict=True))
        if 0 < k < vocab_size or p < 1 or min_p > 0
    ]
    if restricted:
        logits = logits.float()
        rows, divisors = device.upload(np.array(restricted), temperatures[restricted])
        logits[rows] = _restrict(logits[rows], divisors, _select(batch, restricted), device)
        temperatures[restricted] = 1
    divisors, seeds, positions = device.upload(
        temperatures, np.array(batch.seeds, dtype=np.int64), np.array(batch.positions, dtype=np.int64)
    )
    return kernels_for(logits.device).gumbel_argmax(logits, divisors, seeds, positions)


def _restrict(logits: Tensor, temperatures: Tensor, batch: SamplingBatch, device: Device) -> Tensor:
    """Return the logits, each less its row's largest, over the temperature, and -inf where stages 7 to 9 drop it."""
    # With the largest at 0, a temperature near 0 takes all others to -inf, and none to NaN.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    if limits := {row: k for row, k in enumerate(batch.top_k) if 0 < k < scores.shape[-1]}:
        rows, k = device.upload(np.array(list(limits)), np.array(list(limits.values())))
        _keep_from(scores, rows, top_k_floor(scores[rows], k, max(limits.values())))
    if shares := {row: p for row, p in enumerate(batch.top_p) if p < 1}:
        rows, p = device.upload(np.array(list(shares)), np.array(list(shares.values()), dtype=np.float32))
        # To look whether few candidates would do is to wait for the device.
        find_floor = top_p_floor if scores.device.type == "cpu" else top_p_floor_by_sorting
        _keep_from(scores, rows, find_floor(scores[rows], p))
    if shares := {row: p for row, p in enumerate(batch.min_p) if p > 0}:
        rows, p = device.upload(np.array(list(shares)), np.array(list(shares.values()), dtype=np.float32))
        _keep_from(scores, rows, p.log())
    return scores


def top_k_floor(scores: Tensor, k: Tensor, max_k: int) -> Tensor:
    """Return the `k`-th largest score of each row, `[R]`; `k` is `[R]` int64, from 1 to `max_k`."""
    largest = scores.topk(max_k, dim=-1).values
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


def top_p_floor_by_sorting(scores: Tensor, p: Tensor) -> Tensor:
    """What `top_p_floor` returns, from the whole of each row."""
    everything = scores.sort(dim=-1, descending=True).values
    return _floor_in_sorted(everything, scores.logsumexp(dim=-1, keepdim=True), p)[0]


def _floor_in_sorted(scores: Tensor, log_total: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The floor in rows sorted in descending order, and whether the row's probabilities reach `p` at all."""
    probabilities = (scores - log_total).exp_()
    reach = probabilities.cumsum(dim=-1)
    # A token is kept if those before it do not reach p; the first always is.
    kept = (reach - probabilities < p[:, None]).sum(dim=-1).clamp_(min=1)
    return scores.gather(1, kept[:, None] - 1).squeeze(1), reach[:, -1] >= p


def _keep_from(scores: Tensor, rows: Tensor, floor: Tensor) -> None:
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
