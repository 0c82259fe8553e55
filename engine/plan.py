"""What passes between the scheduler and the runner in one step: a plan one way, its results the other."""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.logprobs import TokenLogprobs
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
    one reads.
    """

    rows: tuple[PlanRow, ...]
    num_tokens: int
    moves: tuple[BlockMove, ...] = ()


class Sampled(NamedTuple):
    """One token that was drawn, None where the logits were not numbers; logprobs where the request wants them."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class StepOutput(NamedTuple):
    """The results of a plan.

    Attributes:
        sampled: `num_samples` entries for each row, in the plan's order.
        prompt_logprobs: By row of the plan: one entry for each token of the row's chunk but the prompt's last, about
            the token that follows it.
        pooled: By row of the plan, for each row of a request that pools: the sum over those tokens of its chunk that
            the pooler wants, float32.
    """

    sampled: tuple[Sampled, ...]
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = MappingProxyType({})
    pooled: Mapping[int, np.ndarray] = MappingProxyType({})
