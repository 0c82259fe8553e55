"""Plain torch: the definition of right for sampling on a device, where nothing may ask the device what it computed.

`engine.sampling` says what the stages mean and in which order they come; these are the same, for all rows at once.
`kernels.reference` has the largest of each row and draws without floors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference import gumbel_noise


class PenaltyState(NamedTuple):
    """What penalties need to know of sequences, each in a slot: which tokens they have, and how often in the output."""

    output_counts: Tensor  # [num_slots, vocab_size] int32
    in_prompt: Tensor  # [num_slots, ceil(vocab_size / 32)] int32: bit `t % 32` of word `t // 32` is token t's


class Penalties(NamedTuple):
    """The rows of a step's logits that have penalties, `[num_rows]` each: a row of logits and a slot, and its numbers.

    Rows and slots are int64, distinct; the others float32, as in `SamplingParams`.
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class Likeliest(NamedTuple):
    """Of each row the tokens with the largest numbers, in falling order and of equals the one with the lowest id."""

    token_ids: Tensor  # [num_rows, count] int64
    values: Tensor  # [num_rows, count] float32


def allocate_penalties(num_slots: int, vocab_size: int, device: torch.device) -> PenaltyState:
    """Return the state of `num_slots` sequences that have no tokens."""
    counts = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
    return PenaltyState(counts, torch.zeros(num_slots, -(-vocab_size // 32), dtype=torch.int32, device=device))


def count_tokens(
    state: PenaltyState, slots: Tensor, histories: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, prompts: Tensor
) -> None:
    """Add tokens `starts` to `ends` of some sequences to what their slots know, in place.

    Slots, rows, starts, ends and prompts are `[n]` int64: sequence i has its tokens, int32, in row `rows[i]` of
    `histories` `[max_rows, max_len]`, of which the first `prompts[i]` are its prompt; a token below 0 is not counted.
    """
    for slot, row, start, end, prompt in zip(*(x.tolist() for x in (slots, rows, starts, ends, prompts)), strict=True):
        for position, token in enumerate(histories[row, start:end].tolist(), start):
            if token < 0:
                continue
            if position >= prompt:
                state.output_counts[slot, token] += 1
            else:
                state.in_prompt[slot, token // 32] |= torch.tensor(1 << token % 32).int()


def apply_penalties(logits: Tensor, state: PenaltyState, penalties: Penalties) -> None:
    """Penalise, in place, the logits `[R, vocab_size]` float32 of tokens that prompt or output have.

    Positive ones are divided by the repetition penalty and others multiplied; then the frequency penalty is subtracted
    for each time that the output has the token, and the presence penalty if it has it at all.
    """
    vocab_size = logits.shape[1]
    token = torch.arange(vocab_size, device=logits.device)
    counts, words = state.output_counts[penalties.slots], state.in_prompt[penalties.slots]
    occurs = (words[:, token // 32] >> token % 32 & 1).bool() | (counts > 0)
    repetition, presence, frequency = (x.unsqueeze(1) for x in penalties[2:])
    scores = logits[penalties.rows]
    penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
    penalised -= frequency * counts + presence * (counts > 0)
    logits[penalties.rows] = torch.where(occurs, penalised, scores)


def score_floors(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the smallest score that each row keeps, `[R]` float32; -inf where it keeps all.

    A score is what `kernels.reference.gumbel_argmax` adds noise to. top_k `[R]` int64, 0 or the vocabulary's size where
    it is off; top_p and min_p `[R]` float32, off at 1 and 0. Of a row whose largest is not finite, it may be anything.
    """
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


def token_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token of each row, float32, and its rank, int64: `[R]` each.

    logits `[R, vocab_size]`; token_ids `[R]` int64. The rank is 1 plus the number of tokens that are likelier.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, token_ids.unsqueeze(1))
    return chosen.squeeze(1), (log_probs > chosen).sum(dim=-1) + 1


def top_logprobs(logits: Tensor, count: int) -> Likeliest:
    """Return the `count` tokens of each row, or all if there are fewer, whose log-probabilities are the largest.

    logits `[R, vocab_size]`.
    """
    return likeliest(logits.float().log_softmax(dim=-1), count)


def likeliest(scores: Tensor, count: int) -> Likeliest:
    """Return the `count` tokens of each row of scores, `[R, vocab_size]`, or all if there are fewer, that have most."""
    values, token_ids = scores.float().sort(dim=-1, descending=True, stable=True)
    return Likeliest(token_ids[:, :count], values[:, :count])
