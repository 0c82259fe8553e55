"""One bidirectional encoder for all families: a flat batch of whole sequences in, hidden states out; no KV cache.

Sequences lie one after the other in the flat batch, without padding. Attention runs once for each run of neighbours
of equal length: laid out by length, a batch has few.

lengths      3  3  5
token_ids    a a a  b b b  c c c c c     one entry a token
runs         └─ 2 x 3 ──┘  └─ 1 x 5 ┘    attention's batches
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.encoder_families import EncoderConfig
from kernels.ops import Linear


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Weight and bias `[hidden_size]`, and what is added to the variance."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """One layer: query, key and value projections are one product."""

    qkv: Linear
    attention_out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A sequence classification head; `activation` is a name of `ACTIVATIONS`."""

    dense: Linear
    activation: str
    out: Linear


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights of an encoder, on one device and of one dtype.

    Embeddings are `[rows, hidden_size]`; `distance_bias` is `[num_distance_buckets, num_heads]`. None: not there.
    """

    word_embedding: Tensor
    position_embedding: Tensor
    token_type_embedding: Tensor | None
    embedding_norm: LayerNorm
    distance_bias: Tensor | None
    layers: tuple[EncoderLayerWeights, ...]
    head: HeadWeights | None


class EncoderBatch(NamedTuple):
    """A flat batch. `lengths` are those of its sequences, in order; they stay on the host."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, from 0 in each sequence
    token_types: Tensor  # [num_tokens] int64
    lengths: tuple[int, ...]


class _Run(NamedTuple):
    """Neighbouring sequences of equal length: tokens `start` to `start + num_sequences * length` of the flat batch."""

    start: int
    num_sequences: int
    length: int
    bias: Tensor | None  # [num_heads, length, length]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# By the names that config.json files use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


class Encoder:
    """An encoder with its weights, on one device."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._activation = ACTIVATIONS[config.activation]
        self.device = weights.word_embedding.device

    def forward(self, batch: EncoderBatch) -> Tensor:
        """Return the final hidden states `[num_tokens, hidden_size]`, in the order of `batch`."""
        weights = self._weights
        runs = self._runs(batch.lengths)
        hidden = F.embedding(batch.token_ids, weights.word_embedding)
        if weights.token_type_embedding is not None:
            # Tokenizers for two types are in use with models that have one.
            token_types = batch.token_types.clamp(max=self.config.num_token_types - 1)
            hidden = hidden + F.embedding(token_types, weights.token_type_embedding)
        hidden = hidden + F.embedding(batch.positions + self.config.position_offset, weights.position_embedding)
        hidden = weights.embedding_norm(hidden)
        for layer in weights.layers:
            attended = layer.attention_out(self._attention(layer.qkv(hidden), runs))
            hidden = layer.attention_norm(hidden + attended)
            hidden = layer.output_norm(hidden + layer.down(self._activation(layer.up(hidden))))
        return hidden

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the head's float32 logits `[num_rows, num_labels]` of first tokens' hidden states."""
        head = self._weights.head
        if head is None:
            raise RuntimeError("an encoder without a head was asked to classify")
        states = hidden.to(self.config.dtype)
        return head.out(ACTIVATIONS[head.activation](head.dense(states))).float()

    def _attention(self, qkv: Tensor, runs: Sequence[_Run]) -> Tensor:
        """Attend from `qkv` `[num_tokens, 3 * hidden_size]`, within each sequence; `[num_tokens, hidden_size]`."""
        config = self.config
        attended = qkv.new_empty((len(qkv), config.hidden_size))
        for start, num_sequences, length, bias in runs:
            tokens = slice(start, start + num_sequences * length)
            heads = qkv[tokens].view(num_sequences, length, 3, config.num_heads, config.head_dim)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            run = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            out = attended[tokens].view(num_sequences, length, config.num_heads, config.head_dim)
            out.copy_(run.transpose(1, 2))
        return attended

    def _runs(self, lengths: Sequence[int]) -> list[_Run]:
        runs = []
        start = 0
        for length, neighbours in groupby(lengths):
            num_sequences = len(list(neighbours))
            runs.append(_Run(start, num_sequences, length, self._bias(length)))
            start += num_sequences * length
        return runs

    def _bias(self, length: int) -> Tensor | None:
        """What is added to the scores of sequences of `length` tokens, `[num_heads, length, length]`."""
        table = self._weights.distance_bias
        if table is None:
            return None
        places = torch.arange(length, device=self.device)
        buckets = distance_buckets(places - places.unsqueeze(1), self.config.num_distance_buckets)
        return F.embedding(buckets, table).permute(2, 0, 1)


def distance_buckets(distance: Tensor, num_buckets: int, max_distance: int = 128) -> Tensor:
    """Sort signed distances (key minus query) into buckets, as T5 and MPNet do (arXiv 1910.10683, section 2.1).

    Half of the buckets are for each direction; of these, half hold one distance each, and the others ranges that grow
    by a constant factor up to `max_distance`.
    """
    half = num_buckets // 2
    exact = half // 2
    ahead = torch.where(distance > 0, half, 0)
    distance = distance.abs()
    growth = torch.log(distance.float().clamp(min=exact) / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return ahead + torch.where(distance < exact, distance, far)
