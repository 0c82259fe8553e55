"""From an encoder's config.json, in Transformers' format, to an EncoderConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.fields import Fields
from engine.loader.json_file import read_json
from engine.models.encoder import ACTIVATIONS
from engine.models.encoder_families import ENCODER_FAMILIES, EncoderConfig, EncoderFamily

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What Transformers' configurations say where a file does not.
_DEFAULT_DISTANCE_BUCKETS = 32
_DEFAULT_TOKEN_TYPES = 2
_DEFAULT_LABELS = 2
_DEFAULT_NORM_EPS = 1e-12


def is_encoder(folder: Path) -> bool:
    """Whether `folder`/config.json describes a model of the encoder table."""
    return read_json(folder / "config.json").get("model_type") in ENCODER_FAMILIES


def read_encoder_config(folder: Path) -> tuple[EncoderConfig, EncoderFamily]:
    """Read `folder`/config.json. `dtype` is what the file says, or float32 where it is silent.

    Raises `ModelNotSupported` naming what the engine cannot run, and `ModelFileInvalid` for a field that is missing.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = ENCODER_FAMILIES[raw["model_type"]]
    _refuse_unsupported(raw, path)
    fields = Fields(raw, path)

    def integer(name: str, default: int | None = None) -> int:
        return fields.integer(family.fields.get(name, name), default)

    position_offset = int(fields.number("pad_token_id", family.pad_token_id)) + 1
    config = EncoderConfig(
        architecture=_architecture(raw),
        vocab_size=integer("vocab_size"),
        hidden_size=integer("hidden_size"),
        intermediate_size=integer("intermediate_size"),
        num_layers=integer("num_hidden_layers"),
        num_heads=integer("num_attention_heads"),
        max_positions=integer("max_position_embeddings"),
        position_offset=position_offset if family.positions_after_padding else 0,
        num_token_types=integer("type_vocab_size", _DEFAULT_TOKEN_TYPES) if family.token_types else 0,
        num_distance_buckets=(
            integer("relative_attention_num_buckets", _DEFAULT_DISTANCE_BUCKETS) if family.distance_bias else 0
        ),
        activation=_activation(raw, family, path),
        layer_norm_eps=fields.number("layer_norm_eps", _DEFAULT_NORM_EPS),
        num_labels=_num_labels(fields) if _architecture(raw).endswith("ForSequenceClassification") else None,
        dtype=_dtype(raw, path),
    )
    if config.hidden_size % config.num_heads:
        raise ModelFileInvalid(f"{path}: {config.num_heads} heads do not share {config.hidden_size} dimensions evenly.")
    return config, family


def _architecture(raw: Mapping[str, Any]) -> str:
    return str((raw.get("architectures") or [raw["model_type"]])[0])


def _num_labels(fields: Fields) -> int:
    labels = fields.values.get("id2label")
    return len(labels) if isinstance(labels, dict) else fields.integer("num_labels", _DEFAULT_LABELS)


def _activation(raw: Mapping[str, Any], family: EncoderFamily, path: Path) -> str:
    activation = raw.get(family.fields.get("hidden_act", "hidden_act"), "gelu")
    if activation not in ACTIVATIONS:
        raise ModelNotSupported(
            f"{path}: activation {activation!r} does not run.", hint=f"Those that do: {', '.join(sorted(ACTIVATIONS))}."
        )
    return str(activation)


def _refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    if (positions := raw.get("position_embedding_type", "absolute")) != "absolute":
        raise ModelNotSupported(f"{path}: position embeddings of type {positions!r} do not run; absolute ones do.")
    if raw.get("is_decoder"):
        raise ModelNotSupported(f"{path}: a {raw['model_type']} model that is a decoder does not run.")
    if "quantization_config" in raw:
        raise ModelNotSupported(f"{path}: quantised encoders do not run.", hint="Take the unquantised model.")


def _dtype(raw: Mapping[str, Any], path: Path) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelNotSupported(f"{path}: dtype {name!r} is none that the engine computes in.")
    return _DTYPES[name]
