"""One step of an encoder on the device: one forward pass, one sum or one head's logits a prompt, no request touched."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.device import Device
from engine.models.encoder import Encoder, EncoderBatch
from engine.plan import BlockMove, PlanRow, StepOutput, StepPlan
from engine.pooling.rows import sum_tokens, wanted_places
from engine.runner import within_memory


class EncoderRunner:
    """Runs plans of an `EncoderScheduler`."""

    def __init__(self, encoder: Encoder, device: Device) -> None:
        self._encoder = encoder
        self._device = device

    def move_blocks(self, moves: Iterable[BlockMove]) -> None:
        """There are no blocks, and so no moves."""
        for move in moves:
            raise ValueError(f"an encoder has no blocks to move, but the plan says {move}")

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's prompts. Raises `OutOfMemory` if they do not fit the device; then nothing happened."""
        return within_memory(partial(self._execute, plan), plan, self._device)

    def _execute(self, plan: StepPlan) -> StepOutput:
        batch = build_encoder_batch(plan, self._device)
        places = wanted_places(plan.rows)

        @torch.inference_mode()
        def compute() -> list[Tensor]:
            pooled = sum_tokens(self._encoder.forward(batch), list(places.values()), self._device)
            return [pooled if self._encoder.config.num_labels is None else self._encoder.classify(pooled)]

        (pooled,) = self._device.download(compute).wait()
        return StepOutput((), pooled=dict(zip(places, pooled, strict=True)))


def build_encoder_batch(plan: StepPlan, device: Device) -> EncoderBatch:
    """Lay out `plan`, whose rows are whole prompts, one after the other; reads the requests, changes nothing."""
    lengths = tuple(row.num_tokens for row in plan.rows)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(plan.num_tokens) - np.repeat(starts, lengths)
    token_ids = [token for row in plan.rows for token in row.sequence.token_ids]
    token_types = [token_type for row in plan.rows for token_type in _token_types(row)]
    columns = [np.asarray(values, dtype=np.int64) for values in (token_ids, positions, token_types)]
    ids, places, types = device.upload(*columns)
    return EncoderBatch(ids, places, types, lengths)


def _token_types(row: PlanRow) -> tuple[int, ...]:
    return row.sequence.request.token_types or (0,) * row.num_tokens
