"""What passes between the scheduler and the runner in one step: a plan one way, its results the other."""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.sampling.logprobs import TokenLogprobs
from engine.sequence import Sequence


class PlanRow(NamedTuple):
    """One sequence's share of a step: tokens `start` to `start + num_tokens` of it are computed.

    `num_samples` tokens are drawn after the last of them: none before the sequence's last token is reached, one for
    each continuation that starts there.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


class MoveKind(Enum):
    COPY = auto()  # within the device's pool
    SWAP_OUT = auto()  # from the device's pool to the host's
    SWAP_IN = auto()  # from the host's pool to the device's


class BlockMove(NamedTuple):
    """The contents of block `src`, all layers of it, are wanted in block `dst`."""

    kind: MoveKind
    src: int
    dst: int


class StepPlan(NamedTuple):
    """What one step computes. Rows that sample and rows that only prefill are mixed, in order of admission.

    `moves` come before the forward pass, one after the other in this order: a later one may overwrite what an earlier
    one reads. `started` are the indices of the requests that no step was planned for before.
    """

    rows: tuple[PlanRow, ...]
    num_tokens: int
    moves: tuple[BlockMove, ...] = ()
    started: tuple[int, ...] = ()


class PlanDraft:
    """A plan in the making: rows and moves so far, and the tokens that are left of the step's budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[PlanRow] = []
        self.moves: list[BlockMove] = []
        self.started: list[int] = []

    def add_row(self, sequence: Sequence, num_tokens: int) -> PlanRow:
        """Plan the next `num_tokens` of a sequence; with the last of them, something is sampled."""
        start = sequence.num_computed_tokens
        samples = start + num_tokens == sequence.num_tokens and not sequence.request.pooler
        row = PlanRow(sequence, start, num_tokens, sequence.num_continuations if samples else 0)
        self.rows.append(row)
        self.budget -= num_tokens
        return row

    def drop_rows(self) -> None:
        """Plan no step. The moves are to be made all the same."""
        self.rows = []

    def freeze(self) -> StepPlan:
        num_tokens = sum(row.num_tokens for row in self.rows)
        return StepPlan(tuple(self.rows), num_tokens, tuple(self.moves), tuple(self.started))


class Sampled(NamedTuple):
    """One token that was drawn.

    Attributes:
        token_id: None where there is none, because the logits were not numbers or every token was ruled out.
        all_ruled_out: Which of the two it was.
        logprobs: Where the request wants them.
        candidates: For a row of beam search: the likeliest tokens and their log-probabilities, the likeliest first.
    """

    token_id: int | None
    all_ruled_out: bool = False
    logprobs: TokenLogprobs | None = None
    candidates: tuple[tuple[int, float], ...] = ()


class StepOutput(NamedTuple):
    """The results of a plan.

    Attributes:
        sampled: `num_samples` entries for each row, in the plan's order.
        prompt_logprobs: By row of the plan, for each row of a request that wants them: about each prompt token but the
            first, in order, those that the request lacks.
        pooled: By row of the plan, for each row of a request that pools: the sum over those tokens of its chunk that
            the pooler wants, float32.
        not_finite: Rows of the plan in which something is not a number, or overflowed. What they wrote to the KV cache
            is not to be read again, not even that of earlier tokens: a masked key's weight of 0 does not silence a NaN.
    """

    sampled: tuple[Sampled, ...]
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})
    pooled: Mapping[int, np.ndarray] = MappingProxyType({})
    not_finite: frozenset[int] = frozenset()
