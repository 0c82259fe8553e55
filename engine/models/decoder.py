"""One decoder for all families: the flat mixed batch of a step in, hidden states and logits out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.adapters import Adapters, project
from engine.models.config import ModelConfig
from engine.models.mlp import FeedForward
from engine.models.moe import MixtureOfExperts
from engine.models.rope import RotaryEmbedding
from kernels.ops import AttentionBatch, AttentionPlan, KVCache, LayerKV, Linear, QueryKeyNorms, kernels_for

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: query, key and value projections are one product. A norm that the family does not have is None.

    The norms of queries and keys are as long as what they span: `[head_dim]`, or all heads together. `sinks`
    `[num_heads]` are further logits of the softmax, which take weight and have no value.
    """

    qkv: Linear
    attention_out: Linear
    feed_forward: FeedForward
    input_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    feed_forward_norm: Tensor | None = None
    feed_forward_out_norm: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on one device; embedding `[vocab_size, hidden_size]`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class _Step(NamedTuple):
    """What the layers of one step share: a plan for each distinct window, cosine and sine for each distinct rope."""

    plans: Sequence[AttentionPlan]
    rotations: list[tuple[Tensor, Tensor] | None]
    slot_mapping: Tensor
    kv: list[LayerKV]
    adapters: Adapters | None


class Decoder:
    """A decoder-only model with its weights, on one device."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        device = weights.embedding.device
        kernels = kernels_for(device)
        self._kernels = kernels
        self._rms_norm = kernels.rms_norm_float32 if config.float32_norms else kernels.rms_norm
        self._add_rms_norm = kernels.add_rms_norm_float32 if config.float32_norms else kernels.add_rms_norm
        self._windows, self._window_of_layer = _distinct(layer.window for layer in config.layers)
        self._query_key_norms = [
            QueryKeyNorms(layer.query_norm, layer.key_norm, config.rms_norm_eps, config.float32_norms)
            for layer in weights.layers
        ]
        ropes, self._rope_of_layer = _distinct(layer.rope for layer in config.layers)
        self._ropes = [None if rope is None else RotaryEmbedding(rope, device) for rope in ropes]
        # Rounded as Gemma rounds the root of its hidden size.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=config.dtype, device=device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
        plans: Sequence[AttentionPlan] | None = None,
    ) -> Tensor:
        """Return the final hidden states `[num_tokens, hidden_size]`, and write this step's keys and values to `kv`.

        token_ids and positions are `[num_tokens]` int64, in the order of `batch`. `adapters` add to each projection of
        a layer before anything reads it. `plans` are those of `reserve_plans`, where they take the place of the step's.
        """
        layers = self._weights.layers
        step = self._prepare(positions, batch, kv, adapters, plans)
        residual = self._embed(token_ids)
        hidden = self._norm(residual, layers[0].input_norm)
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            hidden = self._attention(index, hidden, step)
            hidden, residual = self._join(hidden, residual, layer.attention_out_norm, layer.feed_forward_norm)
            hidden = layer.feed_forward(hidden, adapters)
            hidden, residual = self._join(hidden, residual, layer.feed_forward_out_norm, next_norm)
        return hidden

    def capturable(self, kv: KVCache) -> bool:
        """Whether a CUDA graph can hold a forward pass: what is launched for it depends on nothing but its size."""
        plans = self._kernels.graph_plans
        if plans is None or not plans.serves(kv):
            return False
        mixtures = (layer.feed_forward for layer in self._weights.layers)
        return all(part.capturable for part in mixtures if isinstance(part, MixtureOfExperts))

    def reserve_plans(self, batch: AttentionBatch, kv: KVCache, max_context_len: int) -> Sequence[AttentionPlan]:
        """Plans of a graph, see `kernels.ops.GraphPlans`; only where that is `capturable`."""
        assert self._kernels.graph_plans is not None
        reserve = self._kernels.graph_plans.reserve
        return [reserve(batch, kv, self.config.num_heads, window, max_context_len) for window in self._windows]

    def refill_plans(self, plans: Sequence[AttentionPlan], batch: AttentionBatch, kv: KVCache) -> None:
        """Put a step's rows in plans that were reserved."""
        assert self._kernels.graph_plans is not None
        for plan in plans:
            self._kernels.graph_plans.refill(plan, batch, kv, self.config.num_heads)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[num_rows, vocab_size]` of final hidden states `[num_rows, hidden_size]`.

        They are in the model's dtype, or float32 where the model scales or caps them.
        """
        logits = self._weights.lm_head(hidden)
        if self.config.logits_divisor == 1 and self.config.logits_softcap is None:
            return logits
        logits = logits.float()
        if self.config.logits_divisor != 1:
            logits = logits / self.config.logits_divisor
        if (softcap := self.config.logits_softcap) is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits

    def _prepare(
        self,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None,
        plans: Sequence[AttentionPlan] | None,
    ) -> _Step:
        if plans is None:
            num_heads = self.config.num_heads
            plans = [self._kernels.plan_attention(batch, kv, num_heads, window) for window in self._windows]
        rotations = [None if rope is None else rope.rotation(positions) for rope in self._ropes]
        return _Step(plans, rotations, batch.slot_mapping, kv.layers(), adapters)

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = F.embedding(token_ids, self._weights.embedding)
        return embedded if self.config.embedding_multiplier == 1 else embedded * self._embedding_multiplier

    def _attention(self, index: int, hidden: Tensor, step: _Step) -> Tensor:
        config, kernels = self.config, self._kernels
        weights, kv = self._weights.layers[index], step.kv[index]
        qkv = project(weights.qkv, hidden, index, "qkv", step.adapters)
        rotation = step.rotations[self._rope_of_layer[index]]
        query = kernels.write_qkv(qkv, self._query_key_norms[index], rotation, kv, step.slot_mapping)
        plan = step.plans[self._window_of_layer[index]]
        attended = kernels.paged_attention(
            query, kv, plan, config.attention_scale, config.attention_softcap, weights.sinks
        )
        return project(weights.attention_out, attended.flatten(1), index, "attention_out", step.adapters)

    def _join(
        self, x: Tensor, residual: Tensor, out_norm: Tensor | None, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add what a part of a layer gave to the residual stream; return what the next part reads, and the stream."""
        x = self._norm(x, out_norm)
        if self.config.residual_multiplier != 1:
            x = x * self.config.residual_multiplier
        if next_norm is None:
            residual = x + residual
            return residual, residual
        return self._add_rms_norm(x, residual, next_norm, self.config.rms_norm_eps)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._rms_norm(x, weight, self.config.rms_norm_eps)


def _distinct(values: Iterable[_T]) -> tuple[list[_T], list[int]]:
    """Return the distinct values in order of appearance, and for each value its place among them."""
    places: dict[_T, int] = {}
    indices = [places.setdefault(value, len(places)) for value in values]
    return list(places), indices
