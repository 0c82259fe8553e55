"""Log-probabilities of prompts: what each prompt token's hidden state says of the token that follows it."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.device import Device
from engine.plan import PlanRow
from engine.sampling.logprobs import TokenLogprobs, read_logprobs
from kernels.ops import LogprobTensors, kernels_for

# The logits of a chunk of a prompt, all at once, would take more memory than the model's own work.
_ROWS_AT_ONCE = 1024


class PromptTokens(NamedTuple):
    """The prompt tokens of a step of which something is wanted.

    Attributes:
        places: In the flat batch, of the states that say of them.
        token_ids: The tokens themselves.
        num_top: For each, how many of the likeliest are wanted.
        lengths: How many of them belong to which row of the plan.
    """

    places: list[int]
    token_ids: list[int]
    num_top: list[int]
    lengths: dict[int, int]

    @property
    def chunks(self) -> list[slice]:
        return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(self.places), _ROWS_AT_ONCE)]


def wanted_tokens(rows: Sequence[PlanRow]) -> PromptTokens:
    """What the requests of these rows want, lack, and can have of this step."""
    wanted = PromptTokens([], [], [], {})
    first = 0
    for index, row in enumerate(rows):
        if positions := _lacking(row):
            request = row.sequence.request
            wanted.places.extend(first + position - row.start for position in positions)
            wanted.token_ids.extend(request.prompt_token_ids[positions.start + 1 : positions.stop + 1])
            wanted.num_top.extend([request.params.prompt_logprobs or 0] * len(positions))
            wanted.lengths[index] = len(positions)
        first += row.num_tokens
    return wanted


def _lacking(row: PlanRow) -> range:
    """The positions of the row's chunk that say of the next prompt token what the request does not have yet."""
    request = row.sequence.request
    if not request.lacks_prompt_logprobs:
        return range(0)
    start = max(row.start, len(request.prompt_logprobs))
    return range(start, min(row.start + row.num_tokens, request.num_prompt_tokens - 1))


def compute_prompt_logprobs(
    hidden: Tensor, wanted: PromptTokens, logits: Callable[[Tensor], Tensor], device: Device
) -> list[Tensor]:
    """The tensors that `read_prompt_logprobs` reads, of final states `[num_tokens, hidden_size]`.

    `logits` makes `[n, vocab_size]` of n states.
    """
    kernels, tensors = kernels_for(hidden.device), list[Tensor]()
    for chunk in wanted.chunks:
        places, token_ids = device.upload(np.array(wanted.places[chunk]), np.array(wanted.token_ids[chunk]))
        tensors += kernels.token_logprobs(logits(hidden[places]), token_ids, max(wanted.num_top[chunk]))
    return tensors


def read_prompt_logprobs(wanted: PromptTokens, arrays: Sequence[np.ndarray]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """The entries by row of the plan."""
    remaining, num_arrays = iter(arrays), len(LogprobTensors._fields)
    entries = iter(
        [
            entry
            for chunk in wanted.chunks
            for entry in read_logprobs(
                wanted.token_ids[chunk], wanted.num_top[chunk], list(islice(remaining, num_arrays))
            )
        ]
    )
    return {index: tuple(islice(entries, length)) for index, length in wanted.lengths.items()}
