"""From a GGUF file's metadata to a ModelConfig. Key names: llama.cpp's converter, gguf-py."""

from typing import TypeVar

import torch

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.gguf_file import GgufFile
from engine.models.config import LayerConfig, ModelConfig, RopeConfig
from engine.models.families import GGUF_FAMILIES, Family, GgufFamily

_SUPPORTED = f"GGUF architectures that run: {', '.join(sorted(GGUF_FAMILIES))}."
# What makes another model of it where it is set, unless the family reads it.
_SWITCHES = (
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
_LONGROPE_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")

_T = TypeVar("_T", int, float)


def read_gguf_config(file: GgufFile) -> tuple[ModelConfig, Family]:
    """Read the model's configuration; its dtype is bfloat16, for a quantised file has none of its own.

    Raises `ModelNotSupported` naming what the engine cannot run, and `ModelFileInvalid` for a missing key.
    """
    architecture = file.metadata("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise ModelNotSupported(f"{file.path}: the engine does not run {architecture!r}.", hint=_SUPPORTED)
    described = GGUF_FAMILIES[architecture]
    return _Reader(file, architecture, described).read(), described.family


class _Reader:
    def __init__(self, file: GgufFile, architecture: str, described: GgufFamily) -> None:
        self._file = file
        self._architecture = architecture
        self._described = described

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        file, family = self._file, self._described.family
        heads, hidden_size = self._number("attention.head_count", int), self._number("embedding_length", int)
        head_dim = self._number("attention.key_length", int, hidden_size // heads)
        if self._described.head_dim not in (None, head_dim):
            raise ModelNotSupported(
                f"{file.path}: {self._architecture} with heads of {head_dim} dimensions does not run.",
                hint="Its files do not say how attention is scaled. Take the model in safetensors.",
            )
        names, shapes = family.names, file.shapes
        vocab_size = shapes.get(f"{names.embedding}.weight", (0,))[0]
        return ModelConfig(
            architecture=self._architecture,
            vocab_size=self._number("vocab_size", int, vocab_size),
            hidden_size=hidden_size,
            intermediate_size=self._number("feed_forward_length", int),
            layers=self._layers(head_dim),
            num_heads=heads,
            num_kv_heads=self._number("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            max_position_embeddings=self._number("context_length", int),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings=f"{names.lm_head}.weight" not in shapes,
            qkv_bias=f"{names.qkv[0].format(layer=0)}.bias" in shapes,
            attention_out_bias=f"{names.attention_out.format(layer=0)}.bias" in shapes,
            mlp_bias=f"{names.down.format(layer=0)}.bias" in shapes,
            dtype=torch.bfloat16,
            attention_scale=head_dim**-0.5,
            activation=self._described.activation,
            float32_norms=family.float32_norms,
            embedding_multiplier=hidden_size**0.5 if family.scaled_embedding else 1.0,
            attention_softcap=self._optional("attn_logit_softcapping", float),
            logits_softcap=self._optional("final_logit_softcapping", float),
        )

    def _refuse_unsupported(self) -> None:
        for key in _SWITCHES:
            if self._metadata(key) and key not in self._described.keys:
                raise ModelNotSupported(
                    f"{self._file.path}: {self._architecture}.{key} ({self._metadata(key)}) does not run.",
                    hint=_SUPPORTED,
                )
        if self._metadata("attention.sliding_window_pattern") or self._metadata("rope.freq_base_swa"):
            raise ModelNotSupported(f"{self._file.path}: a pattern of windows of its own does not run.")
        if any(name in self._file.shapes for name in _LONGROPE_TENSORS):
            raise ModelNotSupported(f"{self._file.path}: rotary embedding of type 'longrope' does not run.")

    def _layers(self, head_dim: int) -> tuple[LayerConfig, ...]:
        rope, window = self._rope(head_dim), self._optional("attention.sliding_window", int)
        theta, full_every = self._described.window_theta, self._described.full_every
        full = LayerConfig(rope)
        windowed = LayerConfig(rope if theta is None else RopeConfig(head_dim, theta=theta), window)
        return tuple(
            full if window is None or (full_every and (index + 1) % full_every == 0) else windowed
            for index in range(self._number("block_count", int))
        )

    def _rope(self, head_dim: int) -> RopeConfig:
        rotary_dim = self._number("rope.dimension_count", int, head_dim)
        if rotary_dim != head_dim and self._described.family.permuted_rope:
            raise ModelNotSupported(
                f"{self._file.path}: rotary embedding of {rotary_dim} of {head_dim} dimensions does not run."
            )
        theta = self._number("rope.freq_base", float, 10000.0)
        kind = self._metadata("rope.scaling.type") or "none"
        if kind == "linear":
            return RopeConfig(rotary_dim, "linear", theta, factor=self._number("rope.scaling.factor", float))
        if kind != "none":
            raise ModelNotSupported(f"{self._file.path}: rotary embedding of type {kind!r} does not run.")
        if "rope_freqs.weight" in self._file.shapes:
            factors = tuple(self._file.read("rope_freqs.weight").tolist())
            return RopeConfig(rotary_dim, "factors", theta, frequency_factors=factors)
        return RopeConfig(rotary_dim, theta=theta)

    def _metadata(self, key: str) -> object:
        return self._file.metadata(f"{self._architecture}.{key}")

    def _optional(self, key: str, kind: type[_T]) -> _T | None:
        """Return a number, or None where the key is absent or zero, as converters write what a model has not."""
        return self._number(key, kind) if self._metadata(key) else None

    def _number(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        value = self._metadata(key)
        if value is None:
            value = default
        if isinstance(value, list):
            raise ModelNotSupported(
                f"{self._file.path}: {self._architecture}.{key} differs between layers, which does not run."
            )
        if not isinstance(value, int | float) or value <= 0:
            raise ModelFileInvalid(
                f"{self._file.path}: the metadata's {self._architecture}.{key} is {value!r}, not a positive number."
            )
        return kind(value)
