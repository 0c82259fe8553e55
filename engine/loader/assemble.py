"""From a source of tensors to a decoder: one tensor at a time, fused, packed for the device, and dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.loader.sources import TensorSource, check_shapes
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from engine.models.families import Family, expected_shapes
from kernels.ops import Linear, kernels_for


def assemble(config: ModelConfig, family: Family, source: TensorSource, device: torch.device) -> Decoder:
    """Build the decoder in `config.dtype` on `device`.

    Raises `ModelFileInvalid` if `source` lacks tensors, or has one of another shape than `config` says.
    """
    check_shapes(source, expected_shapes(config, family.names))
    builder = _Builder(config, family, source, device)
    names = family.names
    embedding = builder.tensor(f"{names.embedding}.weight")
    if config.tie_word_embeddings:
        lm_head = kernels_for(device).pack_linear(embedding, None)
    else:
        lm_head = builder.linear([names.lm_head], bias=False)
    weights = DecoderWeights(
        embedding=embedding,
        layers=tuple(builder.layer(index) for index in range(config.num_layers)),
        final_norm=builder.tensor(f"{names.final_norm}.weight"),
        lm_head=lm_head,
    )
    return Decoder(config, weights)


class _Builder:
    def __init__(self, config: ModelConfig, family: Family, source: TensorSource, device: torch.device) -> None:
        self._config = config
        self._family = family
        self._source = source
        self._device = device
        names = family.names
        self._permuted = {names.query: config.num_heads, names.key: config.num_kv_heads} if family.permuted_rope else {}

    def layer(self, index: int) -> LayerWeights:
        names, config = self._family.names, self._config
        return LayerWeights(
            input_norm=self.tensor(f"{names.input_norm.format(layer=index)}.weight"),
            qkv=self.linear([names.query, names.key, names.value], bias=config.qkv_bias, layer=index),
            attention_out=self.linear([names.attention_out], bias=config.attention_out_bias, layer=index),
            post_attention_norm=self.tensor(f"{names.post_attention_norm.format(layer=index)}.weight"),
            gate_up=self.linear([names.gate, names.up], bias=config.mlp_bias, layer=index),
            down=self.linear([names.down], bias=config.mlp_bias, layer=index),
        )

    def linear(self, templates: Sequence[str], *, bias: bool, layer: int = 0) -> Linear:
        """Join modules along their outputs into one packed linear."""
        weight = self._fused(templates, "weight", layer)
        return kernels_for(self._device).pack_linear(weight, self._fused(templates, "bias", layer) if bias else None)

    def tensor(self, name: str) -> Tensor:
        # A copy, never a view: nothing may hold on to the mapped file.
        copied: Tensor = self._source.read(name).to(self._device, self._config.dtype, copy=True)
        return copied

    def _fused(self, templates: Sequence[str], kind: str, layer: int) -> Tensor:
        names = [f"{template.format(layer=layer)}.{kind}" for template in templates]
        shapes = [self._source.shapes[name] for name in names]
        fused = torch.empty(
            (sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self._config.dtype, device=self._device
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
