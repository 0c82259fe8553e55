"""One decoder for all families: the flat mixed batch of a step in, hidden states and logits out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from engine.models.adapters import Adapters, Projection
from engine.models.config import ModelConfig
from engine.models.rope import inverse_frequencies
from kernels.ops import AttentionBatch, AttentionPlan, KVCache, LayerKV, Linear, kernels_for


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: query, key and value projections are one product, and so are gate and up."""

    input_norm: Tensor
    qkv: Linear
    attention_out: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, on one device and of one dtype; embedding `[vocab_size, hidden_size]`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class Decoder:
    """A decoder-only model with its weights, on one device."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._weights = weights
        device = weights.embedding.device
        self._kernels = kernels_for(device)
        self._inverse_frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """Return the final hidden states `[num_tokens, hidden_size]`, and write this step's keys and values to `kv`.

        token_ids and positions are `[num_tokens]` int64, in the order of `batch`. `adapters` add to each projection of
        a layer before anything reads it.
        """
        kernels, config, layers = self._kernels, self.config, self._weights.layers
        plan = kernels.plan_attention(batch, kv, config.num_heads)
        angles = positions.unsqueeze(1) * self._inverse_frequencies
        rotation = angles.cos(), angles.sin()
        residual = F.embedding(token_ids, self._weights.embedding)
        hidden = kernels.rms_norm(residual, layers[0].input_norm, config.rms_norm_eps)
        next_norms = [*(layer.input_norm for layer in layers[1:]), self._weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            project = partial(_project, index, adapters)
            hidden = self._attention(layer, hidden, rotation, kv.layer(index), batch.slot_mapping, plan, project)
            hidden, residual = kernels.add_rms_norm(hidden, residual, layer.post_attention_norm, config.rms_norm_eps)
            gate_up = project("gate_up", layer.gate_up, hidden)
            hidden = project("down", layer.down, kernels.silu_and_mul(gate_up))
            hidden, residual = kernels.add_rms_norm(hidden, residual, next_norm, config.rms_norm_eps)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[num_rows, vocab_size]` float32 logits of final hidden states `[num_rows, hidden_size]`."""
        return self._weights.lm_head(hidden).float()

    def _attention(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        kv: LayerKV,
        slot_mapping: Tensor,
        plan: AttentionPlan,
        project: Callable[[Projection, Linear, Tensor], Tensor],
    ) -> Tensor:
        kernels, config = self._kernels, self.config
        heads = project("qkv", layer.qkv, hidden).view(len(hidden), -1, config.head_dim)
        query, key, value = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        query, key = kernels.rotary_embedding(query, key, *rotation)
        kernels.write_kv(key, value, kv, slot_mapping)
        attended = kernels.paged_attention(query, kv, plan, config.head_dim**-0.5)
        return project("attention_out", layer.attention_out, attended.flatten(1))


def _project(layer: int, adapters: Adapters | None, projection: Projection, linear: Linear, x: Tensor) -> Tensor:
    y = linear(x)
    if adapters is not None:
        adapters.add(layer, projection, x, y)
    return y
