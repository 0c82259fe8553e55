"""Rotary embedding: the frequencies of each kind of scaling, and what they make of positions."""

import math

import torch
from torch import Tensor

from engine.models.config import RopeConfig


class RotaryEmbedding:
    """The cosines and sines by which the queries and keys of a step turn."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(rope).to(device)
        self._attention_factor = rope.attention_factor

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[num_tokens, rotary_dim / 2]` float32 of positions `[num_tokens]`."""
        angles = positions.unsqueeze(1) * self._inverse_frequencies
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the angle per position of each pair of dimensions, `[rotary_dim / 2]` float32."""
    base = 1.0 / rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(base, rope)
        case "yarn":
            return _yarn(base, rope)
        case "factors":
            return base / torch.tensor(rope.frequency_factors)
    return base


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Divide wavelengths beyond the original context by `factor`, keep short ones, and blend between (Llama 3.1)."""
    rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * base + (1 - kept) * base / rope.factor


def _yarn(base: Tensor, rope: RopeConfig) -> Tensor:
    """Blend by the number of turns within the original context (YaRN: Peng et al., ICLR 2024, section 3.2)."""
    low, high = _pair_of_turns(rope.beta_fast, rope), _pair_of_turns(rope.beta_slow, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    # A ramp of no width would divide by zero.
    width = (high - low) or 0.001
    divided = ((torch.arange(len(base), dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * divided + base * (1 - divided)


def _pair_of_turns(turns: float, rope: RopeConfig) -> float:
    """Return which pair of dimensions, counted in fractions, turns so many times within the original context."""
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))
