"""What a checkpoint says about its model, read once and frozen."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: `kind` is `default`, `linear` or `llama3`."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model and the switches that its family sets."""

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
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
