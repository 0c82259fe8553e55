"""Log-probabilities of prompts: what each prompt token's hidden state says of the token that follows it."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from engine.plan import PlanRow
from engine.sampling.logprobs import TokenLogprobs, token_logprobs

# The logits of a chunk of a prompt, all at once, would take more memory than the model's own work.
_ROWS_AT_ONCE = 1024


def prompt_logprobs(
    hidden: Tensor, rows: Sequence[PlanRow], logits: Callable[[Tensor], Tensor]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By row of the plan: the log-probabilities that the row's request wants, lacks, and now can have.

    `hidden` `[num_tokens, hidden_size]` are the step's final states; `logits` makes `[n, vocab_size]` of n.
    """
    places: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    lengths: dict[int, int] = {}
    first = 0
    for index, row in enumerate(rows):
        if positions := _lacking(row):
            request = row.sequence.request
            places.extend(first + position - row.start for position in positions)
            token_ids.extend(request.prompt_token_ids[positions.start + 1 : positions.stop + 1])
            num_top.extend([request.params.prompt_logprobs or 0] * len(positions))
            lengths[index] = len(positions)
        first += row.num_tokens
    entries: list[TokenLogprobs] = []
    for start in range(0, len(places), _ROWS_AT_ONCE):
        chunk = slice(start, start + _ROWS_AT_ONCE)
        chosen = hidden[torch.tensor(places[chunk], device=hidden.device)]
        entries += token_logprobs(torch.log_softmax(logits(chosen).float(), dim=-1), token_ids[chunk], num_top[chunk])
    remaining = iter(entries)
    return {index: tuple(islice(remaining, length)) for index, length in lengths.items()}


def _lacking(row: PlanRow) -> range:
    """The positions of the row's chunk that say of the next prompt token what the request does not have yet."""
    request = row.sequence.request
    if not request.lacks_prompt_logprobs:
        return range(0)
    start = max(row.start, len(request.prompt_logprobs))
    return range(start, min(row.start + row.num_tokens, request.num_prompt_tokens - 1))
