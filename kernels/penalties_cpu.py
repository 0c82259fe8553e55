"""Penalties on a CPU, from a list of the tokens that a sequence has: most of the vocabulary it does not have."""

import numpy as np
import torch
from torch import Tensor

from kernels.reference_sampling import IN_PROMPT, NewTokens, Penalties


class TokenCounts:
    """The different tokens of a growing sequence, and how often each occurs in its output."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._token_ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)

    def add(self, token_id: int, increment: int) -> None:
        """Count a token; see `NewTokens` for the increment."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._counts):
                self._token_ids = np.resize(self._token_ids, 2 * place)
                self._counts = np.resize(self._counts, 2 * place)
            self._token_ids[place], self._counts[place] = token_id, 0
        self._counts[place] += increment & (IN_PROMPT - 1)

    @property
    def token_ids(self) -> np.ndarray:
        """The different tokens of prompt and output, `[n]` int64, in order of appearance."""
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> np.ndarray:
        """How often each of `token_ids` occurs in the output, `[n]` float32; 0 for those of the prompt alone."""
        return self._counts[: len(self._places)]


def allocate_counts(num_slots: int, vocab_size: int, device: torch.device) -> list[TokenCounts]:
    """As `kernels.reference_sampling.allocate_counts`, with nothing allocated for tokens that do not occur."""
    return [TokenCounts() for _ in range(num_slots)]


def count_tokens(counts: list[TokenCounts], new: NewTokens) -> None:
    """As `kernels.reference_sampling.count_tokens`."""
    for slot in new.fresh.tolist():
        counts[slot] = TokenCounts()
    for slot, token_id, increment in zip(*(column.tolist() for column in new[1:]), strict=True):
        counts[slot].add(token_id, increment)


def apply_penalties(logits: Tensor, counts: list[TokenCounts], penalties: Penalties) -> None:
    """As `kernels.reference_sampling.apply_penalties`."""
    known = [counts[slot] for slot in penalties.slots.tolist()]
    token_ids = torch.from_numpy(np.concatenate([one.token_ids for one in known]))
    in_output = torch.from_numpy(np.concatenate([one.output_counts for one in known]))
    lengths = torch.tensor([len(one.token_ids) for one in known])
    rows, repetition, presence, frequency = (
        column.repeat_interleave(lengths)
        for column in (penalties.rows, penalties.repetition, penalties.presence, penalties.frequency)
    )
    scores = logits[rows, token_ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    logits[rows, token_ids] = scores - (frequency * in_output + presence * (in_output > 0))
