"""From Transformers' rope_parameters to a RopeConfig.

Two kinds of scaling depend on how long a sequence is. `dynamic` (NTK) derives its base from the length once it exceeds
the original context; `longrope` has one set of factors for sequences within the original context and another for longer
ones. Transformers chooses anew in every forward pass, by the longest position in it. A paged cache cannot: queries
turned by one choice would read keys turned by another, and blocks are shared by sequences of different lengths. So the
choice is made once, when the model is loaded, for the longest sequence that the engine is to admit (`max_model_len`):

    within the original context, or left open    every sequence runs as in Transformers, and longer ones are refused
    beyond it                                    every sequence, a short one too, runs as Transformers runs one of
                                                 `max_model_len` tokens (for longrope, vLLM's rule as well)
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import ModelNotSupported
from engine.loader.fields import Fields
from engine.models.config import RopeConfig

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN_ONLY = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_KEYS = {
    "default": _COMMON,
    "linear": _COMMON | {"factor"},
    "dynamic": _COMMON | {"factor"},
    "llama3": _COMMON | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _COMMON | {"factor", "original_max_position_embeddings"} | _YARN_ONLY,
    "longrope": _COMMON
    | {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"},
}


class Rope(NamedTuple):
    """A rotary embedding, and the longest sequence that it is meant for."""

    config: RopeConfig
    max_length: int


def read_rope(
    parameters: dict[str, Any], path: Path, *, head_dim: int, max_position_embeddings: int, max_model_len: int | None
) -> Rope:
    """Read one rope_parameters object of `path`, in Transformers 5's format.

    Raises `ModelNotSupported` naming a kind or a parameter that does not run, and `ModelFileInvalid`.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _KEYS:
        raise ModelNotSupported(
            f"{path}: rotary embedding of type {kind!r} does not run.", hint=f"Types that do: {', '.join(_KEYS)}."
        )
    if unknown := [name for name, value in parameters.items() if value is not None and name not in _KEYS[kind]]:
        raise ModelNotSupported(f"{path}: {unknown[0]} of a rotary embedding of type {kind!r} does not run.")
    fields = Fields(parameters, path)
    default = RopeConfig(
        rotary_dim=int(head_dim * fields.number("partial_rotary_factor", 1.0)),
        theta=fields.number("rope_theta", 10000.0),
    )
    match kind:
        case "linear":
            default = dataclasses.replace(default, kind="linear", factor=fields.number("factor"))
        case "llama3":
            default = _llama3(default, fields)
        case "yarn":
            default = _yarn(default, fields, max_position_embeddings)
        case "dynamic":
            return _dynamic(default, fields, max_position_embeddings, max_model_len)
        case "longrope":
            return _longrope(default, fields, max_position_embeddings, max_model_len)
    return Rope(default, max_position_embeddings)


def _llama3(default: RopeConfig, fields: Fields) -> RopeConfig:
    return dataclasses.replace(
        default,
        kind="llama3",
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )


def _yarn(default: RopeConfig, fields: Fields, max_position_embeddings: int) -> RopeConfig:
    original = fields.integer("original_max_position_embeddings")
    factor = fields.number("factor", max_position_embeddings / original)
    mscale, mscale_all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    attention_factor = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return dataclasses.replace(
        default,
        kind="yarn",
        attention_factor=fields.number("attention_factor", attention_factor),
        factor=factor,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.values.get("truncate") is not False,
        original_max_position_embeddings=original,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(default: RopeConfig, fields: Fields, original: int, max_model_len: int | None) -> Rope:
    """The base grows with the part of the longest sequence that is beyond the original context."""
    if max_model_len is None or max_model_len <= original:
        return Rope(default, original)
    factor, dim = fields.number("factor"), default.rotary_dim
    growth = factor * max_model_len / original - (factor - 1)
    theta = default.theta * growth ** (dim / (dim - 2))
    return Rope(dataclasses.replace(default, theta=theta), int(factor * original))


def _longrope(default: RopeConfig, fields: Fields, max_position_embeddings: int, max_model_len: int | None) -> Rope:
    original = fields.integer("original_max_position_embeddings")
    factor = fields.number("factor", max_position_embeddings / original)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    within = max_model_len is None or max_model_len <= original
    config = dataclasses.replace(
        default,
        kind="factors",
        attention_factor=fields.number("attention_factor", attention_factor),
        frequency_factors=fields.numbers("short_factor" if within else "long_factor", default.rotary_dim // 2),
    )
    return Rope(config, min(original, max_position_embeddings) if within else max_position_embeddings)
