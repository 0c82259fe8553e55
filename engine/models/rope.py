"""Rotary frequencies of each kind of scaling."""

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of dimensions, `[head_dim / 2]` float32."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(base, rope)
        case "factors":
            return base / torch.tensor(rope.frequency_factors)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Divide wavelengths beyond the original context by `factor`, keep short ones, and blend between (Llama 3.1)."""
    rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * base + (1 - kept) * base / rope.factor
