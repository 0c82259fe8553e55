"""From a config.json in Transformers' format, of version 5 or older, to a ModelConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.json_file import read_json
from engine.models.config import ModelConfig, RopeConfig
from engine.models.families import FAMILIES, Family

_SUPPORTED = f"Architectures that run: {', '.join(sorted(FAMILIES))}."
_ROPE_KINDS = ("default", "linear", "llama3")


def read_hf_config(folder: Path) -> tuple[ModelConfig, Family]:
    """Read `folder`/config.json. `dtype` is what the file says, or float32 where it is silent.

    Raises `ModelNotSupported` naming what the engine cannot run, and `ModelFileInvalid` for a field that is missing.
    """
    path = folder / "config.json"
    raw = read_json(path)
    fields = _Fields(raw, path)
    architecture = _architecture(raw, path)
    family = FAMILIES[architecture]
    _refuse_unsupported(raw, path, fields.integer("max_position_embeddings"))
    heads = fields.integer("num_attention_heads")
    attention_bias = _flag(raw, family.attention_bias_flag)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", fields.integer("hidden_size") // heads),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(raw, path),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=_flag(raw, family.mlp_bias_flag),
        dtype=_dtype(raw, path),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelFileInvalid(
            f"{path}: {config.num_heads} attention heads do not share {config.num_kv_heads} KV heads evenly."
        )
    return config, family


class _Fields:
    """Numbers of a JSON object, with an error that names the field."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw = raw
        self._path = path

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelFileInvalid(f"{self._path}: {name} is {value}, not a positive integer.")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileInvalid(f"{self._path}: {name} is {value!r}, not a number.")
        return value


def _flag(raw: Mapping[str, Any], name: str | None) -> bool:
    return bool(raw.get(name)) if name else False


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    architectures = raw.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return str(architecture)
    named = ", ".join(map(str, architectures)) or f"model type {raw.get('model_type')!r}, no architecture"
    raise ModelNotSupported(f"{path} describes {named}, which the engine does not run.", hint=_SUPPORTED)


def _refuse_unsupported(raw: Mapping[str, Any], path: Path, max_position_embeddings: int) -> None:
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelNotSupported(
            f"{path}: weights quantised with {method} do not run.", hint="Take the unquantised model, or a GGUF file."
        )
    window = raw.get("sliding_window")
    active = window is not None and raw.get("use_sliding_window", True) and window < max_position_embeddings
    if active or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelNotSupported(f"{path}: sliding-window attention (window {window}) does not run.", hint=_SUPPORTED)
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelNotSupported(f"{path}: activation {activation!r} does not run; silu does.")
    rope = raw.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1
    if partial != 1:
        raise ModelNotSupported(f"{path}: rotary embedding of a part ({partial}) of the head does not run.")


def _rope(raw: Mapping[str, Any], path: Path) -> RopeConfig:
    # Transformers 5 keeps theta and scaling in one object; before, they were rope_theta and rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ModelNotSupported(
            f"{path}: rotary embedding of type {kind!r} does not run.", hint=f"Types that do: {', '.join(_ROPE_KINDS)}."
        )
    fields = _Fields(scaling, path)
    theta = fields.number("rope_theta", _Fields(raw, path).number("rope_theta", 10000.0))
    if kind == "linear":
        return RopeConfig(kind, theta, fields.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            fields.number("factor"),
            fields.number("low_freq_factor"),
            fields.number("high_freq_factor"),
            fields.integer("original_max_position_embeddings"),
        )
    return RopeConfig(kind, theta)


def _dtype(raw: Mapping[str, Any], path: Path) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if dtype is None:
        raise ModelNotSupported(f"{path}: dtype {name!r} is none that the engine computes in.")
    return dtype
