"""From a source of tensors to a decoder: one tensor at a time, fused, packed for the device, and dropped."""

from collections.abc import Container, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.config import Quantize
from engine.errors import ConfigError, ModelNotSupported
from engine.loader.experts import ExpertReader
from engine.loader.packing import LinearPacker, multiplies
from engine.loader.pages import empty_in_own_pages
from engine.loader.quantized import QuantizedTensors
from engine.loader.sources import TensorSource, check_shapes
from engine.models.config import MixtureConfig, ModelConfig
from engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from engine.models.expert_names import ExpertNames
from engine.models.families import Family, WeightNames, expected_shapes
from engine.models.mlp import DenseFeedForward, FeedForward
from engine.models.moe import GatedExpert, MixtureOfExperts
from kernels.ops import ActivateAndMul, Expert, GateUp, Linear, kernels_for
from kernels.quantize import LinearWeight, join_neighbours

_NAMES_SHOWN = 5
# Frequencies that older versions of Transformers stored in every layer, and that the configuration gives as well.
_DERIVED = (".inv_freq",)


def assemble(
    config: ModelConfig, family: Family, source: TensorSource, device: torch.device, quantize: Quantize | None = None
) -> Decoder:
    """Build the decoder in `config.dtype` on `device`, its linears quantised as `EngineConfig.quantize` says.

    Linears that `source` has quantised stay so where the device multiplies such, and are dequantised where it does not.
    Raises `ModelFileInvalid` if `source` lacks tensors, or has one of another shape than `config` says,
    `ModelNotSupported` if a layer has tensors that the decoder would not use, and `ConfigError` for a `quantize` that
    the device or the checkpoint does not go with.
    """
    names = family.names_in(source.shapes)
    expected = expected_shapes(config, family, names)
    check_shapes(source, expected)
    _refuse_unused(config, names, source, expected)
    builder = _Builder(config, family, names, source, device, quantize)
    embedding = builder.tensor(f"{names.embedding}.weight")
    lm_head = builder.tied_head(embedding) if config.tie_word_embeddings else builder.head(names.lm_head)
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
    # Older GPTQ checkpoints hold biases of zeros for linears that have none.
    if unused := [name for name in unused if not name.endswith(".bias") or source.read(name).any()]:
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
        self._packer = LinearPacker(self._kernels, config.dtype, quantize)
        # Of a checkpoint whose quantised linears stay as they are.
        self._quantized: QuantizedTensors | None = None
        if isinstance(source, QuantizedTensors) and multiplies(source.layout.kind, config.dtype, self._kernels):
            if quantize:
                raise ConfigError(
                    f"The checkpoint's weights are quantised, and quantize is {quantize}.", hint="Leave it out."
                )
            self._quantized = source
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
        parts = self._weight(templates, layer)
        return self._packer.linear(parts, self._fused(templates, "bias", layer) if bias else None)

    def head(self, module: str) -> Linear:
        if self._quantized and self._quantized.is_quantized(module):
            return self.linear([module], bias=False)
        return self._packer.head(self._fused([module], "weight", layer=0))

    def tied_head(self, embedding: Tensor) -> Linear:
        return self._packer.head(embedding)

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
        parts = self._weight(templates, layer)
        bias = self._fused(templates, "bias", layer) if config.mlp_bias else None
        return self._packer.gate_up(parts, bias, config.activation)

    def _mixture(self, mixture: MixtureConfig, names: ExpertNames, layer: int) -> MixtureOfExperts:
        router = self._router(names, layer, bias=mixture.bias)
        return MixtureOfExperts(mixture, router, self._experts(mixture, names, layer), self._kernels)

    def _experts(self, mixture: MixtureConfig, names: ExpertNames, layer: int) -> Sequence[Expert]:
        """Stack what is read in the model's dtype, and pack what is quantised one by one."""
        if self._quantized and self._quantized.is_quantized(names.down.format(layer=layer, expert=0)):
            return [self._quantized_expert(mixture, names, layer, expert) for expert in range(mixture.num_experts)]
        dtype = self._config.dtype
        reader = ExpertReader(self._source, names, bias=mixture.bias, dtype=dtype, device=self._device)
        weights = (reader.read(layer, expert) for expert in range(mixture.num_experts))
        stack = None if self._quantizes else self._kernels.stack_experts
        if stack is None:
            return [
                self._expert(mixture, [one.gate_up], one.gate_up_bias, [one.down], one.down_bias) for one in weights
            ]
        return stack(weights, mixture.num_experts, self._activate_and_mul(mixture))

    def _quantized_expert(self, mixture: MixtureConfig, names: ExpertNames, layer: int, expert: int) -> GatedExpert:
        gate_up = [template.format(layer=layer, expert=expert) for template in names.gate_up]
        down = [names.down.format(layer=layer, expert=expert)]
        biases = [self._fused(modules, "bias", layer) if mixture.bias else None for modules in (gate_up, down)]
        return self._expert(mixture, self._weight(gate_up, layer), biases[0], self._weight(down, layer), biases[1])

    def _expert(
        self,
        mixture: MixtureConfig,
        gate_up: Sequence[LinearWeight],
        gate_up_bias: Tensor | None,
        down: Sequence[LinearWeight],
        down_bias: Tensor | None,
    ) -> GatedExpert:
        if mixture.clamped_swiglu is None:
            packed = self._packer.gate_up(gate_up, gate_up_bias, self._config.activation)
        else:
            packed = GateUp.of(self._packer.linear(gate_up, gate_up_bias), self._activate_and_mul(mixture))
        return GatedExpert(packed, self._packer.linear(down, down_bias))

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

    def _weight(self, templates: Sequence[str], layer: int) -> list[LinearWeight]:
        """Return the weights of modules joined along their outputs, in parts where some are quantised unlike others."""
        quantized, modules = self._quantized, [template.format(layer=layer) for template in templates]
        if quantized is None or not any(map(quantized.is_quantized, modules)):
            return [self._fused(templates, "weight", layer)]
        return join_neighbours(
            [
                quantized.packed(module, self._device)
                if quantized.is_quantized(module)
                else self.tensor(f"{module}.weight")
                for module in modules
            ]
        )

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
