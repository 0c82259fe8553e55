"""From an encoder's folder to a model that is ready to run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.loader.encoder_config import read_encoder_config
from engine.loader.sentence_transformers import (
    PoolingDefaults,
    ScoreActivation,
    read_pooling_defaults,
    read_score_activation,
)
from engine.loader.sources import SafetensorsSource, TensorSource, check_shapes
from engine.models.encoder import (
    Encoder,
    EncoderLayerWeights,
    EncoderWeights,
    HeadWeights,
    LayerNorm,
)
from engine.models.encoder_families import EncoderConfig, EncoderFamily, encoder_shapes
from kernels.ops import Linear, kernels_for

# A classification head reads the first token.
_HEAD_POOLING = PoolingDefaults("cls", normalize=False)
# BERT's first checkpoints, and those trained from them, call a norm's weight and bias so.
_OLD_NORM_NAMES = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder in memory. `tokenizer` and `revision` are as in `LoadedModel`.

    `pooling` is how a vector is made unless a request says otherwise. `score_activation` is what follows the head of a
    cross-encoder; None for a model without a head.
    """

    encoder: Encoder
    tokenizer: PreTrainedTokenizerBase | None
    pooling: PoolingDefaults
    score_activation: ScoreActivation | None
    revision: str | None = None


def load_encoder(
    folder: Path, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype | None, device: torch.device
) -> LoadedEncoder:
    """Load the encoder in `folder`; `dtype` None keeps the checkpoint's own.

    Raises ModelNotSupported or ModelFileInvalid.
    """
    config, family = read_encoder_config(folder)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    source = _BareNames(SafetensorsSource(folder), family.prefix)
    labels = config.num_labels
    return LoadedEncoder(
        assemble_encoder(config, family, source, device),
        tokenizer,
        read_pooling_defaults(folder, otherwise="mean") if labels is None else _HEAD_POOLING,
        None if labels is None else read_score_activation(folder, labels),
    )


def assemble_encoder(
    config: EncoderConfig, family: EncoderFamily, source: TensorSource, device: torch.device
) -> Encoder:
    """Build the encoder in `config.dtype` on `device`; tensors have their names without the base model's prefix.

    Raises `ModelFileInvalid` if `source` lacks tensors, or has one of another shape than `config` says.
    """
    check_shapes(source, encoder_shapes(config, family))
    names, builder = family.names, _Builder(config, source, device)
    head = family.head
    weights = EncoderWeights(
        word_embedding=builder.tensor(f"{names.word_embedding}.weight"),
        position_embedding=builder.tensor(f"{names.position_embedding}.weight"),
        token_type_embedding=builder.tensor(f"{names.token_type_embedding}.weight") if family.token_types else None,
        embedding_norm=builder.norm(names.embedding_norm),
        distance_bias=builder.tensor(f"{names.distance_bias}.weight") if family.distance_bias else None,
        layers=tuple(
            EncoderLayerWeights(
                qkv=builder.linear([name.format(layer=layer) for name in (names.query, names.key, names.value)]),
                attention_out=builder.linear([names.attention_out.format(layer=layer)]),
                attention_norm=builder.norm(names.attention_norm.format(layer=layer)),
                up=builder.linear([names.up.format(layer=layer)]),
                down=builder.linear([names.down.format(layer=layer)]),
                output_norm=builder.norm(names.output_norm.format(layer=layer)),
            )
            for layer in range(config.num_layers)
        ),
        head=(
            None
            if config.num_labels is None
            else HeadWeights(builder.linear([head.dense]), head.activation, builder.linear([head.out]))
        ),
    )
    return Encoder(config, weights)


class _BareNames:
    """A source's tensors under the names of the base model alone, and with today's names of norms."""

    def __init__(self, source: TensorSource, prefix: str) -> None:
        self._source = source
        self._names = {_bare_name(name, prefix): name for name in source.shapes}
        self.shapes = {bare: source.shapes[name] for bare, name in self._names.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])


def _bare_name(name: str, prefix: str) -> str:
    module, _, kind = name.removeprefix(f"{prefix}.").rpartition(".")
    return f"{module}.{_OLD_NORM_NAMES.get(kind, kind)}"


class _Builder:
    def __init__(self, config: EncoderConfig, source: TensorSource, device: torch.device) -> None:
        self._config = config
        self._source = source
        self._device = device

    def tensor(self, name: str) -> Tensor:
        # A copy, never a view: nothing may hold on to the mapped file.
        copied: Tensor = self._source.read(name).to(self._device, self._config.dtype, copy=True)
        return copied

    def norm(self, module: str) -> LayerNorm:
        return LayerNorm(self.tensor(f"{module}.weight"), self.tensor(f"{module}.bias"), self._config.layer_norm_eps)

    def linear(self, modules: Sequence[str]) -> Linear:
        """Join modules along their outputs into one packed linear."""
        weight = torch.cat([self.tensor(f"{module}.weight") for module in modules])
        bias = torch.cat([self.tensor(f"{module}.bias") for module in modules])
        return kernels_for(self._device).pack_linear(weight, bias)
