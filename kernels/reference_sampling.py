"""Plain torch: the definition of right for sampling on a device, where nothing may ask the device what it computed.

`engine.sampling` says what the stages mean and in which order they come; these are the same, for all rows at once.
`kernels.reference` has the largest of each row and draws without limits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference import gumbel_argmax, gumbel_noise

IN_PROMPT = 1 << 30
"""Set in the count of a token that the prompt has; below it is how often the output has the token."""


class NewTokens(NamedTuple):
    """What is to be counted, of sequences that have a slot each.

    Attributes:
        fresh: `[F]` int64, distinct: slots of sequences that are counted from their first token on. Others had them.
        slots, token_ids: `[n]` int64. A slot may have a token several times.
        increments: `[n]` int32: `IN_PROMPT` for a token of the prompt, once at most, and 1 each time in the output.
    """

    fresh: Tensor
    slots: Tensor
    token_ids: Tensor
    increments: Tensor


class Penalties(NamedTuple):
    """The rows of a step's logits that have penalties, `[P]` each: a row of logits and a slot, and its numbers.

    Rows and slots are int64, rows distinct; the others float32, as in `SamplingParams`.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class Limits(NamedTuple):
    """Of which tokens each row is drawn: top_k `[R]` int64, off at 0; top_p and min_p `[R]` float32, off at 1 and 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class LogprobTensors(NamedTuple):
    """What is known of one token of each of R rows, and of the likeliest, see `Likeliest`.

    The rank is 1 plus the number of tokens that are likelier, so that of equals all have the same.
    """

    chosen: Tensor  # [R] float32
    ranks: Tensor  # [R] int64
    top_values: Tensor  # [R, count] float32
    top_token_ids: Tensor  # [R, count] int64


class Likeliest(NamedTuple):
    """Of each row the tokens with the largest numbers, in falling order and of equals the one with the lowest id."""

    values: Tensor  # [R, count] float32
    token_ids: Tensor  # [R, count] int64


def allocate_counts(num_slots: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return the counts of `num_slots` sequences, `[num_slots, vocab_size]` int32; none is known before it is fresh."""
    return torch.empty(num_slots, vocab_size, dtype=torch.int32, device=device)


def count_tokens(counts: Tensor, new: NewTokens) -> None:
    """Add new tokens to the counts of their slots, in place."""
    counts.index_fill_(0, new.fresh, 0)
    counts.view(-1).index_add_(0, new.slots * counts.shape[1] + new.token_ids, new.increments)


def apply_penalties(logits: Tensor, counts: Tensor, penalties: Penalties) -> None:
    """Penalise, in place, the logits `[R, vocab_size]` float32 of tokens that prompt or output have.

    Positive ones are divided by the repetition penalty and others multiplied; then the frequency penalty is subtracted
    for each time that the output has the token, and the presence penalty if it has it at all.
    """
    known = counts[penalties.slots]
    in_output = known & (IN_PROMPT - 1)
    repetition, presence, frequency = (x.unsqueeze(1) for x in penalties[2:])
    scores = logits[penalties.rows]
    penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
    penalised -= frequency * in_output + presence * (in_output > 0)
    logits[penalties.rows] = torch.where(known > 0, penalised, scores)


def draw(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """Draw a token for each row, as `kernels.reference.gumbel_argmax`, of those that the limits keep: `[R]` int64."""
    if limits is None:
        return gumbel_argmax(logits, temperatures, seeds, positions)
    floors = score_floors(logits, temperatures, limits)
    return gumbel_argmax_above(logits, temperatures, seeds, positions, floors)


def score_floors(logits: Tensor, temperatures: Tensor, limits: Limits) -> Tensor:
    """Return the smallest score that each row keeps, `[R]` float32; -inf where it keeps all.

    A score is what `kernels.reference.gumbel_argmax` adds noise to. Of a row whose largest is not finite, the floor may
    be anything.
    """
    top_k, top_p, min_p = limits
    scores = _scores(logits, temperatures)
    vocab_size = scores.shape[1]
    in_order = scores.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size) - 1
    floors = in_order.gather(1, last.unsqueeze(1))
    probabilities = in_order.masked_fill(in_order < floors, -torch.inf).softmax(dim=-1)
    # A token is kept if those before it do not reach p; the first always is.
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < top_p.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp(min=1)
    of_top_p = in_order.gather(1, kept - 1).where(top_p.unsqueeze(1) < 1, -torch.inf)
    floors = floors.where((last < vocab_size - 1).unsqueeze(1), -torch.inf)
    return torch.maximum(torch.maximum(floors, of_top_p).squeeze(1), min_p.log())


def gumbel_argmax_above(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, floors: Tensor
) -> Tensor:
    """As `kernels.reference.gumbel_argmax`, of the tokens whose score is not below the row's floor, `[R]` float32."""
    scores = _scores(logits, temperatures)
    scores = scores.masked_fill(scores < floors.unsqueeze(1), -torch.inf)
    return (scores + gumbel_noise(seeds, positions, scores.shape[1])).argmax(dim=-1)


def _scores(logits: Tensor, temperatures: Tensor) -> Tensor:
    wide = logits.float()
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Return the log-probability and the rank of one token of each row, and the `num_top` likeliest of the row.

    logits `[R, vocab_size]`; token_ids `[R]` int64.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, token_ids.unsqueeze(1))
    return LogprobTensors(chosen.squeeze(1), (log_probs > chosen).sum(dim=-1) + 1, *likeliest(log_probs, num_top))


def likeliest(scores: Tensor, count: int) -> Likeliest:
    """Return the `count` tokens of each row that have the largest scores, `[R, vocab_size]` float32, or all of them.

    Of a row with a NaN they may be any.
    """
    values, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    return Likeliest(values[:, :count], token_ids[:, :count])
