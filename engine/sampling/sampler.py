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
from engine.sampling.logprobs import read_logprobs
from engine.sampling.token_rules import apply_edits
from kernels.ops import Likeliest, Limits, LogprobTensors, kernels_for


class Draws(NamedTuple):
    """What was drawn for R rows of logits, on the device.

    Attributes:
        token_ids: `[R]` int64; of a row without a token, any of the vocabulary.
        best: `[R]` float32, the largest logit. There is no token where it is NaN or infinite.
        logprobs: Of the rows that want them, in order; None if none does.
        candidates: Of the rows of beam search, in order, with their log-probabilities; None if there are none.
    """

    token_ids: Tensor
    best: Tensor
    logprobs: LogprobTensors | None
    candidates: Likeliest | None

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `read_draws` takes them."""
        return [self.token_ids, self.best, *(self.logprobs or ()), *(self.candidates or ())]


def sample(logits: Tensor, batch: SamplingBatch, device: Device) -> Draws:
    """Choose one token for each row of `logits` `[R, vocab_size]`, which may be overwritten.

    The host never waits for the device: what branches depend on is in the lists of `batch`.
    """
    kernels = kernels_for(logits.device)
    if batch.num_logprobs:
        wanted = _rows(device, batch.num_logprobs)
        unedited = logits[wanted]
    if batch.num_candidates or batch.grammar or batch.edits:
        logits = logits.float()
    if batch.num_candidates:
        beams = _rows(device, batch.num_candidates)
        logits[beams] = torch.log_softmax(logits[beams], dim=-1)
    if batch.grammar:
        kernels.apply_token_bitmask(logits, batch.grammar.bitmask, batch.grammar.rows)
    if batch.edits:
        apply_edits(logits, batch.edits)
    best, token_ids = kernels.largest(logits)
    random_rows = [row for row, temperature in enumerate(batch.temperature) if temperature > 0]
    if len(random_rows) == len(batch.temperature):
        token_ids = _sample_random(logits, random_rows, batch, device)
    elif random_rows:
        places = _rows(device, random_rows)
        token_ids[places] = _sample_random(logits[places], random_rows, batch, device)
    logprobs = candidates = None
    if batch.num_logprobs:
        logprobs = kernels.token_logprobs(unedited, token_ids[wanted], max(batch.num_logprobs.values()))
    if batch.num_candidates:
        candidates = kernels.likeliest(logits[beams], max(batch.num_candidates.values()))
    return Draws(token_ids, best, logprobs, candidates)


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


def _sample_random(logits: Tensor, rows: Sequence[int], batch: SamplingBatch, device: Device) -> Tensor:
    """Stages 6 to 10 for logits `[n, vocab_size]` of these rows of the batch; returns token ids `[n]`."""
    limits = torch.finfo(torch.float32)
    # An infinite temperature would take to NaN what is -inf.
    temperatures = np.clip([batch.temperature[row] for row in rows], limits.tiny, limits.max).astype(np.float32)
    columns: list[np.ndarray] = [
        temperatures,
        np.array([batch.seeds[row] for row in rows], dtype=np.int64),
        np.array([batch.positions[row] for row in rows], dtype=np.int64),
    ]
    if any(_is_limited(batch, row, logits.shape[1]) for row in rows):
        columns += [
            np.array([batch.top_k[row] for row in rows], dtype=np.int64),
            np.array([batch.top_p[row] for row in rows], dtype=np.float32),
            np.array([batch.min_p[row] for row in rows], dtype=np.float32),
        ]
    divisors, seeds, positions, *kept = device.upload(*columns)
    return kernels_for(logits.device).draw(logits, divisors, seeds, positions, Limits(*kept) if kept else None)


def _is_limited(batch: SamplingBatch, row: int, vocab_size: int) -> bool:
    return 0 < batch.top_k[row] < vocab_size or batch.top_p[row] < 1 or batch.min_p[row] > 0
