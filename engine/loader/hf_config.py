"""From a config.json in Transformers' format to a ModelConfig.

Transformers' own configuration classes read the file first: they know every older spelling and the values of fields
that files leave out. What is read here is their one current form.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.fields import Fields
from engine.loader.headless import with_head
from engine.loader.hf_rope import Rope, read_rope
from engine.loader.json_file import read_json
from engine.loader.quantization import quantization_method, read_quantization
from engine.models.config import LayerConfig, MixtureConfig, ModelConfig
from engine.models.families import FAMILIES, SWITCHES, Family
from kernels.linear import Activation

_SUPPORTED = f"Architectures that run: {', '.join(sorted(FAMILIES))}."
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_hf_config(folder: Path, max_model_len: int | None = None) -> tuple[ModelConfig, Family]:
    """Read `folder`/config.json. `dtype` is what the file says, or float32 where it is silent.

    `max_model_len`, the longest sequence that will be asked for, decides about rotary embeddings that depend on the
    length; see `engine.loader.hf_rope`.

    Raises `ModelNotSupported` naming what the engine cannot run, and `ModelFileInvalid` for a field that is wrong.
    """
    path = folder / "config.json"
    raw = read_json(path)
    architecture = _architecture(raw, path)
    _refuse_quantised(raw, path, FAMILIES[architecture])
    reader = _Reader(_resolve(raw, path), path, FAMILIES[architecture])
    config = reader.read(architecture, _dtype(raw, path), max_model_len)
    if config.num_heads % config.num_kv_heads:
        raise ModelFileInvalid(
            f"{path}: {config.num_heads} attention heads do not share {config.num_kv_heads} KV heads evenly."
        )
    return config, FAMILIES[architecture]


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    architectures = raw.get("architectures") or []
    for architecture in map(with_head, architectures):
        if architecture in FAMILIES:
            return architecture
    named = ", ".join(map(str, architectures)) or f"model type {raw.get('model_type')!r}, no architecture"
    raise ModelNotSupported(f"{path} describes {named}, which the engine does not run.", hint=_SUPPORTED)


def _refuse_quantised(raw: Mapping[str, Any], path: Path, family: Family) -> None:
    experts = family.names.experts
    if quantization_method(raw) == "mxfp4" and experts is not None and experts.layout == "mxfp4":
        return
    read_quantization(raw, path)


def _resolve(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of the text model as Transformers' class for the model type completes them."""
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelNotSupported(f"{path}: model_type {model_type!r} is none that Transformers knows.")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(raw).get_text_config()
        fields: dict[str, Any] = config.to_dict()
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelFileInvalid(f"{path} describes no {model_type} model: {error}") from error
    return fields


def _dtype(raw: Mapping[str, Any], path: Path) -> torch.dtype:
    text = raw.get("text_config") or {}
    name = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelNotSupported(f"{path}: dtype {name!r} is none that the engine computes in.")
    return _DTYPES[name]


class _Reader:
    """Reads the fields of one text model, and refuses what its family does not run."""

    def __init__(self, values: dict[str, Any], path: Path, family: Family) -> None:
        self._values = values
        self._path = path
        self._family = family
        self._fields = Fields(values, path)

    def read(self, architecture: str, dtype: torch.dtype, max_model_len: int | None) -> ModelConfig:
        fields, family = self._fields, self._family
        switches = {name: self._switch(name, self._values) for name in SWITCHES}
        hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", hidden_size // heads)
        layers, longest = self._layers(head_dim, max_model_len)
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            layers=layers,
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position_embeddings=longest,
            rms_norm_eps=fields.number("rms_norm_eps"),
            tie_word_embeddings=bool(self._values.get("tie_word_embeddings")),
            qkv_bias=family.qkv_bias or bool(switches["attention_bias"]),
            attention_out_bias=bool(switches["attention_bias"]),
            mlp_bias=bool(switches["mlp_bias"]),
            dtype=dtype,
            attention_scale=_attention_scale(switches, head_dim),
            activation=self._activation(),
            float32_norms=family.float32_norms,
            embedding_multiplier=hidden_size**0.5 if family.scaled_embedding else switches["embedding_multiplier"],
            residual_multiplier=switches["residual_multiplier"],
            logits_divisor=switches["logits_scaling"],
            attention_softcap=switches["attn_logit_softcapping"],
            logits_softcap=switches["final_logit_softcapping"],
            mixture=None if family.names.experts is None else self._mixture(len(layers)),
        )

    def _mixture(self, num_layers: int) -> MixtureConfig:
        fields, values = self._fields, self._values
        step = fields.integer("decoder_sparse_step", 1)
        dense = {layer for layer in range(num_layers) if (layer + 1) % step} | set(values.get("mlp_only_layers") or ())
        mixture = MixtureConfig(
            num_experts=fields.integer("num_local_experts", values.get("num_experts")),
            experts_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("moe_intermediate_size", fields.integer("intermediate_size")),
            # Families whose files do not say always normalise.
            normalized=values.get("norm_topk_prob") is not False,
            bias=self._family.expert_bias,
            clamped_swiglu=(
                (fields.number("swiglu_alpha"), fields.number("swiglu_limit")) if self._family.clamped_swiglu else None
            ),
            dense_layers=frozenset(dense),
        )
        if mixture.experts_per_token > mixture.num_experts:
            raise ModelFileInvalid(
                f"{self._path}: num_experts_per_tok is {mixture.experts_per_token} of {mixture.num_experts} experts."
            )
        return mixture

    def _switch(self, name: str, values: Mapping[str, Any]) -> Any:
        """Return the value of a switch; raise `ModelNotSupported` if it is set and the family does not have it."""
        neutral, value = SWITCHES[name], values.get(name)
        if value is None or value == neutral:
            return neutral
        if name not in self._family.fields:
            raise ModelNotSupported(f"{self._path}: {name} ({value}) does not run in this architecture.")
        return value

    def _activation(self) -> Activation:
        # Gemma's files hold a hidden_act as well, which Gemma's models do not read.
        name = self._values.get("hidden_activation") or self._values.get("hidden_act")
        if name not in _ACTIVATIONS:
            raise ModelNotSupported(
                f"{self._path}: activation {name!r} does not run.", hint=f"Those that do: {', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[name]

    def _layers(self, head_dim: int, max_model_len: int | None) -> tuple[tuple[LayerConfig, ...], int]:
        """Return what sets the layers apart, and the longest sequence that their rotary embeddings are meant for."""
        types = self._layer_types()
        ropes = self._ropes(set(types), head_dim, max_model_len)
        longest = min(rope.max_length for rope in ropes.values())
        turned = self._values.get("no_rope_layers") or [1] * len(types)
        if len(turned) < len(types):
            raise ModelFileInvalid(f"{self._path}: no_rope_layers has {len(turned)} entries for {len(types)} layers.")
        window = None
        if "sliding_attention" in types:
            window = self._fields.integer("sliding_window")
            # As wide as any sequence, it hides nothing, and its layers can share the others' plan.
            window = window if window < longest else None
        layers = tuple(
            LayerConfig(ropes[kind].config if turns else None, window if kind == "sliding_attention" else None)
            for kind, turns in zip(types, turned, strict=False)
        )
        return layers, longest

    def _layer_types(self) -> list[str]:
        """Return `full_attention` or `sliding_attention` for each layer."""
        windowed = self._values.get("sliding_window") is not None and self._values.get("use_sliding_window", True)
        types = self._values.get("layer_types")
        everywhere = self._family.windows == "all" and windowed
        uniform = ["sliding_attention" if everywhere else "full_attention"] * self._fields.integer("num_hidden_layers")
        if self._family.windows == "layer_types":
            types = types or uniform
        elif types not in (None, uniform):
            raise ModelNotSupported(f"{self._path}: layer_types of several kinds does not run in this architecture.")
        elif windowed and not everywhere:
            raise ModelNotSupported(f"{self._path}: a sliding_window does not run in this architecture.")
        if unknown := set(types or uniform) - {"full_attention", "sliding_attention"}:
            raise ModelNotSupported(f"{self._path}: layers of type {', '.join(sorted(unknown))} do not run.")
        return types or uniform

    def _ropes(self, types: set[str], head_dim: int, max_model_len: int | None) -> dict[str, Rope]:
        """Return the rotary embedding of each type of layer."""
        parameters = self._values.get("rope_parameters") or {}
        ropes = {}
        for kind in types:
            of_kind = parameters.get(kind, parameters)
            self._switch("partial_rotary_factor", of_kind)
            ropes[kind] = read_rope(
                of_kind,
                self._path,
                head_dim=head_dim,
                max_position_embeddings=self._fields.integer("max_position_embeddings"),
                max_model_len=max_model_len,
            )
        return ropes


def _attention_scale(switches: Mapping[str, Any], head_dim: int) -> float:
    if switches["attention_multiplier"] is not None:
        return float(switches["attention_multiplier"])
    return float((switches["query_pre_attn_scalar"] or head_dim) ** -0.5)
