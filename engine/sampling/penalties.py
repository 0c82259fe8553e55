"""Penalties: which tokens a sequence has already, counted on the device, in the row that the sequence has there.

A step sends only what is new since the last one, mostly a token for each row. What a row's counts are worth is known
here: of a sequence that was just admitted, forked, or preempted and back in another's row, all tokens are counted anew.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.device import Device
from engine.row_slots import RowSlots
from engine.sequence import Sequence
from kernels.ops import NewTokens, Penalties, TokenCounts, kernels_for
from kernels.reference_sampling import IN_PROMPT


class CountsOnDevice:
    """The counts themselves, which are there from the first step on that needs them."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._counts: TokenCounts = None

    def penalise(self, logits: Tensor, new: NewTokens, penalties: Penalties) -> None:
        """Count what is new, and then penalise `logits` `[R, vocab_size]` float32 in place."""
        kernels = kernels_for(logits.device)
        if self._counts is None:
            self._counts = kernels.allocate_counts(self._num_rows, logits.shape[1], logits.device)
        kernels.count_tokens(self._counts, new)
        kernels.apply_penalties(logits, self._counts, penalties)


class PenaltyEdit(NamedTuple):
    """What penalties do to a step's logits. The counts are right if all edits before it were applied."""

    counts: CountsOnDevice
    new: NewTokens
    penalties: Penalties

    def apply(self, logits: Tensor) -> None:
        self.counts.penalise(logits, self.new, self.penalties)


class PenaltyRows:
    """What is counted in which row. A model's sequences have one of these between them."""

    def __init__(self, slots: RowSlots) -> None:
        self._slots = slots
        self._counts = CountsOnDevice(slots.num_rows)
        self._counted: dict[int, tuple[Sequence, int]] = {}  # by row: whose counts they are, and of how many tokens

    def forget(self) -> None:
        """Count all anew from now on: an edit may not have been applied."""
        self._counted.clear()

    def edit(self, sequences: Iterable[Sequence], device: Device) -> PenaltyEdit | None:
        """Collect the penalties of a step whose rows of logits continue `sequences`; None if there are none."""
        penalised = {row: sequence for row, sequence in enumerate(sequences) if _is_penalised(sequence)}
        if not penalised:
            return None
        slots = self._slots.take(penalised.values())
        fresh: list[int] = []
        counted: list[tuple[int, int, int]] = []
        for slot, sequence in zip(slots, penalised.values(), strict=True):
            owner, num_counted = self._counted.get(slot, (None, 0))
            if owner is not sequence:
                fresh.append(slot)
                num_counted = sequence.request.num_prompt_tokens
                counted.extend((slot, token_id, IN_PROMPT) for token_id in set(sequence.token_ids[:num_counted]))
            counted.extend((slot, token_id, 1) for token_id in sequence.token_ids[num_counted:])
            self._counted[slot] = sequence, sequence.num_tokens
        params = [sequence.request.params for sequence in penalised.values()]
        new = np.array(counted, dtype=np.int64).reshape(-1, 3)
        on_device = device.upload(
            np.array(fresh, dtype=np.int64),
            *(np.ascontiguousarray(column) for column in (new[:, 0], new[:, 1])),
            new[:, 2].astype(np.int32),
            np.array(list(penalised)),
            np.array(slots),
            np.array([p.repetition_penalty for p in params], dtype=np.float32),
            np.array([p.presence_penalty for p in params], dtype=np.float32),
            np.array([p.frequency_penalty for p in params], dtype=np.float32),
        )
        return PenaltyEdit(self._counts, NewTokens(*on_device[:4]), Penalties(*on_device[4:]))


def _is_penalised(sequence: Sequence) -> bool:
    rules = sequence.request.token_rules
    return rules is not None and rules.penalises
