"""One step on the device: one forward pass, one sampling pass, no request touched."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.errors import OutOfMemory
from engine.lora import step_adapters
from engine.models.adapters import Adapters
from engine.plan import BlockMove, MoveKind, StepOutput, StepPlan
from engine.pooling.rows import pool_rows
from engine.sampling.prompt_logprobs import prompt_logprobs
from engine.sampling.sampler import sample
from engine.structured.grammar import GrammarMasks
from kernels.ops import AttentionBatch, KVCache, copy_block


class Model(Protocol):
    """What a step needs of `engine.models.decoder.Decoder`."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Runner:
    """Runs plans of a scheduler whose blocks are those of `kv`, and those of `host` if it swaps."""

    def __init__(self, model: Model, kv: KVCache, device: torch.device, host: KVCache | None = None) -> None:
        self._model = model
        self._kv = kv
        self._caches = {MoveKind.COPY: (kv, kv)}
        if host:
            self._caches |= {MoveKind.SWAP_OUT: (kv, host), MoveKind.SWAP_IN: (host, kv)}
        self._device = device
        self._grammar_masks = GrammarMasks(device)

    def move_blocks(self, moves: Iterable[BlockMove]) -> None:
        """Carry out a plan's moves, in their order. Nothing is allocated, so that they never run out of memory."""
        for kind, src, dst in moves:
            source, target = self._caches[kind]
            copy_block(source, src, target, dst)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's tokens and sample.

        Raises `OutOfMemory` if the step does not fit the device. Then nothing happened that counts: what was written
        to the KV cache lies beyond every request's `num_computed_tokens`.
        """
        return execute_within_memory(self._execute, plan, self._device)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepOutput:
        batch = build_batch(plan, self._kv.block_size, self._device)
        adapters = step_adapters(plan.rows, self._device)
        hidden = self._model.forward(batch.token_ids, batch.positions, batch.attention, self._kv, adapters)
        prompts = prompt_logprobs(hidden, plan.rows, self._model.logits)
        pooled = pool_rows(hidden, plan.rows)
        if batch.logits_rows.numel() == 0:
            return StepOutput((), prompts, pooled, _not_finite(hidden, batch.attention))
        logits = self._model.logits(hidden[batch.logits_rows])
        # Here, where a GPU has been given all of the forward pass and is busy with it.
        sampling = batch.sampling._replace(grammar=self._grammar_masks.fill(plan.rows))
        return StepOutput(sample(logits, sampling), prompts, pooled, _not_finite(hidden, batch.attention))


def _not_finite(hidden: Tensor, batch: AttentionBatch) -> frozenset[int]:
    """The rows with a token whose final hidden state, of `[num_tokens, hidden_size]`, is not finite.

    What is not finite in a layer is so in the residual stream from there on, and so in the end.
    """
    tokens = hidden.isfinite().all(dim=-1).logical_not_().nonzero().flatten().int()
    return frozenset((torch.searchsorted(batch.query_start, tokens, right=True) - 1).tolist())


def execute_within_memory(
    execute: Callable[[StepPlan], StepOutput], plan: StepPlan, device: torch.device
) -> StepOutput:
    """Return `execute(plan)`. Raises `OutOfMemory` for whichever way torch says it; by then its tensors are gone."""
    try:
        return execute(plan)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        message = str(error)
    # Only here, outside of the handler, are the step's tensors gone: the exception's traceback held them.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise OutOfMemory(f"A step of {plan.num_tokens} tokens does not fit the memory: {message}")


def _is_out_of_memory(error: RuntimeError) -> bool:
    # CUDA has an exception of its own for it; the CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
