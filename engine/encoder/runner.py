"""One step of an encoder on the device: one forward pass, one sum or one head's logits a prompt, no request touched."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from engine.models.encoder import Encoder, EncoderBatch
from engine.plan import BlockMove, PlanRow, StepOutput, StepPlan
from engine.pooling.rows import sum_tokens, wanted_places
from engine.runner import execute_within_memory


class EncoderRunner:
    """Runs plans of an `EncoderScheduler`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def move_blocks(self, moves: Iterable[BlockMove]) -> None:
        """There are no blocks, and so no moves."""
        for move in moves:
            raise ValueError(f"an encoder has no blocks to move, but the plan says {move}")

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's prompts. Raises `OutOfMemory` if they do not fit the device; then nothing happened."""
        return execute_within_memory(self._execute, plan, self._encoder.device)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepOutput:
        hidden = self._encoder.forward(build_encoder_batch(plan, self._encoder.device))
        places = wanted_places(plan.rows)
        pooled = sum_tokens(hidden, list(places.values()))
        if self._encoder.config.num_labels is not None:
            pooled = self._encoder.classify(pooled)
        return StepOutput((), pooled=dict(zip(places, pooled.cpu().numpy(), strict=True)))


def build_encoder_batch(plan: StepPlan, device: torch.device) -> EncoderBatch:
    """Lay out `plan`, whose rows are whole prompts, one after the other; reads the requests, changes nothing."""
    lengths = tuple(row.num_tokens for row in plan.rows)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(plan.num_tokens) - np.repeat(starts, lengths)
    token_ids = [token for row in plan.rows for token in row.sequence.token_ids]
    token_types = [token_type for row in plan.rows for token_type in _token_types(row)]

    def on_device(values: np.ndarray | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device, non_blocking=True)

    return EncoderBatch(on_device(token_ids), on_device(positions), on_device(token_types), lengths)


def _token_types(row: PlanRow) -> tuple[int, ...]:
    return row.sequence.request.token_types or (0,) * row.num_tokens
