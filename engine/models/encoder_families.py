"""The table of encoder families: what a checkpoint of each model type holds, under which names.

All are the same encoder: embeddings, then layers that normalise after each residual sum. What sets them apart is where
positions begin, whether tokens have types, whether attention is biased by distance, and the head of a classifier.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.models.families import Shapes


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The shape of an encoder and the switches that its family and its checkpoint set.

    Attributes:
        max_positions: Rows of the position table; the first token of a sequence has row `position_offset`.
        num_token_types: Rows of the table of token types (which text of a pair); 0 where there is none.
        num_distance_buckets: Kinds of distance that bias attention; 0 where nothing does.
        activation: Of the feed-forward layer, by the name in a config.json.
        num_labels: Outputs of the sequence classification head; None for a model without a head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    position_offset: int
    num_token_types: int
    num_distance_buckets: int
    activation: str
    layer_norm_eps: float
    num_labels: int | None
    dtype: torch.dtype

    @property
    def max_length(self) -> int:
        """The most tokens that one sequence can have."""
        return self.max_positions - self.position_offset

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of a checkpoint's modules, without the base model's prefix; those of a layer hold `{layer}`."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    output_norm: str
    word_embedding: str = "embeddings.word_embeddings"
    position_embedding: str = "embeddings.position_embeddings"
    token_type_embedding: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    distance_bias: str = "encoder.relative_attention_bias"


@dataclass(frozen=True, slots=True)
class HeadNames:
    """A sequence classification head: `out(activation(dense(hidden state of the first token)))`."""

    dense: str
    activation: str
    out: str


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """What sets a model type apart.

    Attributes:
        prefix: Of the base model's tensors in checkpoints of a model with a head.
        fields: Names of config.json fields, where they are not the usual ones.
        pad_token_id: The default of the field of that name.
        positions_after_padding: Positions begin after the padding token's id, and not at 0.
        token_types, distance_bias: Whether there are such tables.
    """

    prefix: str
    names: EncoderNames
    head: HeadNames
    fields: Mapping[str, str] = field(default_factory=dict)
    pad_token_id: int = 0
    positions_after_padding: bool = False
    token_types: bool = True
    distance_bias: bool = False


_BERT_NAMES = EncoderNames(
    query="encoder.layer.{layer}.attention.self.query",
    key="encoder.layer.{layer}.attention.self.key",
    value="encoder.layer.{layer}.attention.self.value",
    attention_out="encoder.layer.{layer}.attention.output.dense",
    attention_norm="encoder.layer.{layer}.attention.output.LayerNorm",
    up="encoder.layer.{layer}.intermediate.dense",
    down="encoder.layer.{layer}.output.dense",
    output_norm="encoder.layer.{layer}.output.LayerNorm",
)

_MPNET_NAMES = EncoderNames(
    query="encoder.layer.{layer}.attention.attn.q",
    key="encoder.layer.{layer}.attention.attn.k",
    value="encoder.layer.{layer}.attention.attn.v",
    attention_out="encoder.layer.{layer}.attention.attn.o",
    attention_norm="encoder.layer.{layer}.attention.LayerNorm",
    up="encoder.layer.{layer}.intermediate.dense",
    down="encoder.layer.{layer}.output.dense",
    output_norm="encoder.layer.{layer}.output.LayerNorm",
)

_DISTILBERT_NAMES = EncoderNames(
    query="transformer.layer.{layer}.attention.q_lin",
    key="transformer.layer.{layer}.attention.k_lin",
    value="transformer.layer.{layer}.attention.v_lin",
    attention_out="transformer.layer.{layer}.attention.out_lin",
    attention_norm="transformer.layer.{layer}.sa_layer_norm",
    up="transformer.layer.{layer}.ffn.lin1",
    down="transformer.layer.{layer}.ffn.lin2",
    output_norm="transformer.layer.{layer}.output_layer_norm",
)

_DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}

_ROBERTA_HEAD = HeadNames("classifier.dense", "tanh", "classifier.out_proj")

_ROBERTA = EncoderFamily("roberta", _BERT_NAMES, _ROBERTA_HEAD, pad_token_id=1, positions_after_padding=True)

# By the `model_type` of a config.json.
ENCODER_FAMILIES = {
    "bert": EncoderFamily("bert", _BERT_NAMES, HeadNames("pooler.dense", "tanh", "classifier")),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": EncoderFamily(
        "distilbert",
        _DISTILBERT_NAMES,
        HeadNames("pre_classifier", "relu", "classifier"),
        fields=_DISTILBERT_FIELDS,
        token_types=False,
    ),
    "mpnet": EncoderFamily(
        "mpnet",
        _MPNET_NAMES,
        _ROBERTA_HEAD,
        pad_token_id=1,
        positions_after_padding=True,
        token_types=False,
        distance_bias=True,
    ),
}


def encoder_shapes(config: EncoderConfig, family: EncoderFamily) -> Shapes:
    """Return every tensor that a checkpoint of this encoder has to hold, by its name without the prefix."""
    names, hidden = family.names, config.hidden_size
    shapes: Shapes = {
        f"{names.word_embedding}.weight": (config.vocab_size, hidden),
        f"{names.position_embedding}.weight": (config.max_positions, hidden),
        **_norm_shapes(names.embedding_norm, hidden),
    }
    if family.token_types:
        shapes[f"{names.token_type_embedding}.weight"] = (config.num_token_types, hidden)
    if family.distance_bias:
        shapes[f"{names.distance_bias}.weight"] = (config.num_distance_buckets, config.num_heads)
    for layer in range(config.num_layers):
        for template in (names.query, names.key, names.value, names.attention_out):
            shapes |= _linear_shapes(template.format(layer=layer), hidden, hidden)
        shapes |= _linear_shapes(names.up.format(layer=layer), config.intermediate_size, hidden)
        shapes |= _linear_shapes(names.down.format(layer=layer), hidden, config.intermediate_size)
        for template in (names.attention_norm, names.output_norm):
            shapes |= _norm_shapes(template.format(layer=layer), hidden)
    if config.num_labels is not None:
        shapes |= _linear_shapes(family.head.dense, hidden, hidden)
        shapes |= _linear_shapes(family.head.out, config.num_labels, hidden)
    return shapes


def _linear_shapes(module: str, out_features: int, in_features: int) -> Shapes:
    return {f"{module}.weight": (out_features, in_features), f"{module}.bias": (out_features,)}


def _norm_shapes(module: str, size: int) -> Shapes:
    return {f"{module}.weight": (size,), f"{module}.bias": (size,)}
