"""From a source of tensors to a decoder: one tensor at a time, fused, packed for the device, and dropped."""

from collections.abc import Container, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.config import Quantize
from engine.errors import ModelNotSupported
from engine.loader.experts import ExpertReader
from engine.loader.pages import empty_in_own_pages
from engine.loader.sources import TensorSource, check_shapes
from engine.models.config import MixtureConfig, ModelConfig
from engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from engine.models.expert_names import ExpertNames
from engine.models.families import Family, WeightNames, expected_shapes
from engine.models.mlp import DenseFeedForward, FeedForward
from engine.models.moe import GatedExpert, MixtureOfExperts
from kernels.experts import ExpertWeights
from kernels.ops import ActivateAndMul, Expert, GateUp, Linear, kernels_for

_NAMES_SHOWN = 5
# Frequencies that older versions of Transformers stored in every layer, and that the configuration gives as well.
_DERIVED = (".inv_freq",)


def assemble(
    config: ModelConfig, family: Family, source: TensorSource, device: torch.device, quantize: Quantize | None = None
) -> Decoder:
    """Build the decoder in `config.dtype` on `device`, its linears quantised as `EngineConfig.quantize` says.

    Raises `ModelFileInvalid` if `source` lacks tensors, or has one of another shape than `config` says, and
    `ModelNotSupported` if a layer has tensors that the decoder would not use.
    """
    names = family.names_in(source.shapes)
    expected = expected_shapes(config, family, names)
    check_shapes(source, expected)
    _refuse_unused(config, names, source, expected)
    builder = _Builder(config, family, names, source, device, quantize)
    embedding = builder.tensor(f"{names.embedding}.weight")
    if config.tie_word_embeddings:
        lm_head = builder.pack_linear(embedding, None)
    else:
        lm_head = builder.linear([names.lm_head], bias=False)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(builder.layer(index) for index in range(config.num_layers)),
        final_norm=builder.norm(names.final_norm),
        lm_head=lm_head,
    )
    return Decoder(config, weights)


def _refuse_unused(config: ModelConfig, names: WeightNames, source: TensorSource, used: Container[str]) -> None:
    """A bias or norm that no switch turned on would be left out in silence."""
    layers = tuple(names.layer.format(layer=index) for index in range(config.num_layers))
    unused = [
        name for name in source.shapes if name.startswith(layers) and name not in used and not name.endswith(_DERIVED)
    ]
    if unused:
        raise ModelNotSupported(
            f"{config.architecture} has no place for tensors of the checkpoint: {', '.join(unused[:_NAMES_SHOWN])}."
        )


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        names: WeightNames,
        source: TensorSource,
        device: torch.device,
        quantize: Quantize | None,
    ) -> None:
        self._config = config
        self._family = family
        self._names = names
        self._source = source
        self._device = device
        self._kernels = kernels_for(device)
        self._quantizes = quantize is not None
        self.pack_linear = self._kernels.int8.linear if quantize else self._kernels.pack_linear
        self._pack_gate_up = self._kernels.int8.gate_up if quantize else self._kernels.pack_gate_up
        heads = (config.num_heads, config.num_kv_heads)
        self._permuted = dict(zip(names.qkv, heads, strict=False)) if family.permuted_rope else {}

    def layer(self, index: int) -> LayerWeights:
        names, config = self._names, self._config
        return LayerWeights(
            qkv=self.linear(names.qkv, bias=config.qkv_bias, layer=index),
            attention_out=self.linear([names.attention_out], bias=config.attention_out_bias, layer=index),
            feed_forward=self._feed_forward(index),
            input_norm=self._optional_norm(names.input_norm, index),
            query_norm=self._optional_norm(names.query_norm, index),
            key_norm=self._optional_norm(names.key_norm, index),
            attention_out_norm=self._optional_norm(names.attention_out_norm, index),
            feed_forward_norm=self._optional_norm(names.feed_forward_norm, index),
            feed_forward_out_norm=self._optional_norm(names.feed_forward_out_norm, index),
            sinks=None if names.sinks is None else self.tensor(names.sinks.format(layer=index)),
        )

    def linear(self, templates: Sequence[str], *, bias: bool, layer: int = 0) -> Linear:
        """Join modules along their outputs into one packed linear."""
        weight = self._fused(templates, "weight", layer)
        return self.pack_linear(weight, self._fused(templates, "bias", layer) if bias else None)

    def norm(self, module: str) -> Tensor:
        """Read a norm's weight: in float32 where it is applied so, lest a sum with one lose digits."""
        dtype = torch.float32 if self._config.float32_norms else self._config.dtype
        return self.tensor(f"{module}.weight", dtype).add_(self._family.norm_offset)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        # A copy, never a view: nothing may hold on to the mapped file.
        copied: Tensor = self._source.read(name).to(self._device, dtype or self._config.dtype, copy=True)
        return copied

    def _feed_forward(self, layer: int) -> FeedForward:
        names, config = self._names, self._config
        if names.experts is not None and (mixture := config.mixture_of(layer)) is not None:
            return self._mixture(mixture, names.experts, layer)
        gate_up = self._gate_up(names.gate_up, layer)
        return DenseFeedForward(layer, gate_up, self.linear([names.down], bias=config.mlp_bias, layer=layer))

    def _gate_up(self, templates: Sequence[str], layer: int) -> GateUp:
        config = self._config
        weight = self._fused(templates, "weight", layer)
        bias = self._fused(templates, "bias", layer) if config.mlp_bias else None
        return self._pack_gate_up(weight, bias, config.activation)

    def _mixture(self, mixture: MixtureConfig, names: ExpertNames, layer: int) -> MixtureOfExperts:
        config = self._config
        reader = ExpertReader(self._source, names, bias=mixture.bias, dtype=config.dtype, device=self._device)
        weights = (reader.read(layer, expert) for expert in range(mixture.num_experts))
        router = self._router(names, layer, bias=mixture.bias)
        # Stacks are of what is read: quantised experts are packed one by one.
        stack = None if self._quantizes else self._kernels.stack_experts
        if stack is None:
            experts: Sequence[Expert] = [self._expert(mixture, one) for one in weights]
        else:
            experts = stack(weights, mixture.num_experts, self._activate_and_mul(mixture))
        return MixtureOfExperts(mixture, router, experts, self._kernels)

    def _expert(self, mixture: MixtureConfig, weights: ExpertWeights) -> GatedExpert:
        if mixture.clamped_swiglu is None:
            gate_up = self._pack_gate_up(weights.gate_up, weights.gate_up_bias, self._config.activation)
        else:
            product = self.pack_linear(weights.gate_up, weights.gate_up_bias)
            gate_up = GateUp.of(product, self._activate_and_mul(mixture))
        return GatedExpert(gate_up, self.pack_linear(weights.down, weights.down_bias))

    def _activate_and_mul(self, mixture: MixtureConfig) -> ActivateAndMul:
        if mixture.clamped_swiglu is None:
            return self._kernels.activate_and_mul(self._config.activation)
        alpha, limit = mixture.clamped_swiglu
        return partial(self._kernels.clamped_swiglu, alpha=alpha, limit=limit)

    def _router(self, names: ExpertNames, layer: int, *, bias: bool) -> Linear:
        # Never quantised: it is small, and an error in it takes other experts.
        weight = self._fused([names.router], "weight", layer)
        return self._kernels.pack_linear(weight, self._fused([names.router], "bias", layer) if bias else None)

    def _optional_norm(self, template: str | None, layer: int) -> Tensor | None:
        return None if template is None else self.norm(template.format(layer=layer))

    def _fused(self, templates: Sequence[str], kind: str, layer: int) -> Tensor:
        names = [f"{template.format(layer=layer)}.{kind}" for template in templates]
        shapes = [self._source.shapes[name] for name in names]
        fused = empty_in_own_pages(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), self._config.dtype, self._device
        )
        parts = fused.split([shape[0] for shape in shapes])
        for template, name, part in zip(templates, names, parts, strict=True):
            tensor = self._source.read(name)
            heads = self._permuted.get(template)
            part.copy_(_halves(tensor, heads) if heads else tensor)
        return fused


def _halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of query and key rows, which sets the two dimensions of a rotary pair side by side."""
    pairs: Tensor = tensor.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
