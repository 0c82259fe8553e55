"""What a checkpoint says about its model, read once and frozen."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: how fast each pair of dimensions turns.

    `kind` is `default`; `linear` (positions divided by `factor`); `llama3` (low frequencies divided by `factor`, with a
    ramp between the two frequency factors); or `factors` (each frequency divided by its own of `frequency_factors`, as
    GGUF files carry them, head_dim / 2 of them).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model and the switches that its family and its checkpoint set."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
