"""Models without a family table: Transformers' own modelling code, with the engine's paged attention plugged in.

    [num_tokens]  flat batch of the step
         │ unsqueeze
    [1, num_tokens]  ──►  the model's body  ──►  each attention layer calls `AttentionInterface`  ──►  PagedStep.attend
                                                                                                    writes and reads KV
    [num_tokens, hidden_size]  ◄──  final hidden states              (the body builds no mask and keeps no cache)

Interface: https://huggingface.co/docs/transformers/attention_interface.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelNotSupported
from engine.models.adapters import Adapters
from kernels.ops import AttentionBatch, AttentionPlan, Kernels, KVCache, kernels_for

# No mask function is registered under this name: then Transformers' models build no mask.
PAGED_ATTENTION = "pagemill"


class CannotPage(Exception):
    """A model is none that paged attention can compute; the message says why, as half a sentence."""


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """The sizes of a model that Transformers computes; a `ModelShape`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class AttentionLayer(NamedTuple):
    """Which layer of the KV cache an attention module has, and how many positions it sees, its own among them."""

    kv_layer: int
    window: int | None


class Attention(Protocol):
    """What a model's attention layers find in the keyword argument `paged_step` of its forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Return `[1, num_tokens, num_heads, value_dim]`; the tensors are `[1, num_heads, num_tokens, head_dim]`."""


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: Attention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Serve Transformers' `AttentionInterface`: outputs and no weights.

    Raises `CannotPage` for a model that does not hand the keyword arguments of its forward pass on to its attention.
    """
    if paged_step is None:
        raise CannotPage("its layers do not hand keyword arguments on to their attention")
    return paged_step.attend(module, query, key, value, attention_mask, options), None


AttentionInterface.register(PAGED_ATTENTION, attention_function)


class PagedStep(NamedTuple):
    """What the attention layers of one step share."""

    kernels: Kernels
    kv: KVCache
    slot_mapping: Tensor
    layers: Mapping[nn.Module, AttentionLayer]
    plans: Mapping[int | None, AttentionPlan]  # by window

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Write the step's keys and values to the cache, and attend over each sequence's own blocks."""
        layer = self.layers[module]
        layer_kv = self.kv.layer(layer.kv_layer)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        value_dim = value.shape[-1]
        query, key, value = (_flat(x, layer_kv.key.shape[-1]) for x in (query, key, value))
        self.kernels.write_kv(key, value, layer_kv, self.slot_mapping)
        attended = self.kernels.paged_attention(
            query, layer_kv, self.plans[layer.window], scale, options.get("softcap"), options.get("s_aux")
        )
        return attended[..., :value_dim].unsqueeze(0)


class FallbackDecoder:
    """A causal language model of Transformers behind the surface of `engine.models.decoder.Decoder`.

    `model` is loaded with the attention implementation `PAGED_ATTENTION`; `layers` are its attention modules.
    """

    def __init__(
        self, model: PreTrainedModel, config: FallbackConfig, layers: Mapping[nn.Module, AttentionLayer]
    ) -> None:
        self.config = config
        self._body = model.base_model
        self._head = _head_only(model)
        self._layers = layers
        self._windows = {layer.window for layer in layers.values()}
        self._kernels = kernels_for(model.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVCache,
        adapters: Adapters | None = None,
    ) -> Tensor:
        """Return the final hidden states `[num_tokens, hidden_size]`, and write this step's keys and values to `kv`.

        token_ids and positions are `[num_tokens]` int64, in the order of `batch`. Raises `ModelNotSupported` for
        `adapters`: Transformers' layers have no place where they could be added for some rows and not for others.
        """
        if adapters is not None:
            raise ModelNotSupported(f"{self.config.architecture} runs by Transformers' code: no LoRA adapters there.")
        plans = {
            window: self._kernels.plan_attention(batch, kv, self.config.num_heads, window) for window in self._windows
        }
        hidden: Tensor = self._body(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            paged_step=PagedStep(self._kernels, kv, batch.slot_mapping, self._layers, plans),
        ).last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[num_rows, vocab_size]` float32 logits of final hidden states `[num_rows, hidden_size]`."""
        logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()


@dataclass(frozen=True, slots=True)
class _BodyOutput:
    """What models' heads look for in their body's output; all but the first may be None."""

    last_hidden_state: Tensor
    cache: None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _Passthrough(nn.Module):
    """Stands where a model's body was, and takes the embeddings it is given for the body's result."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_options: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def _head_only(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` without its body, sharing its weights.

    What follows the body is more than a product with a matrix: families scale, cap and shift their logits.
    """
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Passthrough()}
    return head


def _flat(x: Tensor, head_dim: int) -> Tensor:
    """Turn `[1, heads, num_tokens, dim]` to `[num_tokens, heads, head_dim]`, with zeros where `dim` is less."""
    flat = x[0].transpose(0, 1)
    return F.pad(flat, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else flat.contiguous()
