"""GGUF files: metadata to a ModelConfig, quantised tensors to floating point.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Key names: llama.cpp's converter, gguf-py.
"""

from pathlib import Path
from typing import Any, TypeVar

import gguf
import torch
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.models.config import LayerConfig, ModelConfig, RopeConfig
from engine.models.families import GGUF_FAMILIES, Family

_SUPPORTED = f"GGUF architectures that run: {', '.join(sorted(GGUF_FAMILIES))}."


_T = TypeVar("_T", int, float)


class GgufFile:
    """An open GGUF file; a `TensorSource`. Raises `ModelFileInvalid` if the file is corrupt or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OverflowError, OSError, UnicodeDecodeError) as error:
            raise ModelFileInvalid(
                f"{path} is no GGUF file, or truncated ({error}).", hint="Fetch it again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        # ggml counts dimensions from the one that is contiguous in memory.
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    def metadata(self, key: str) -> Any:
        """Return the value of `key`, or None where the file has none."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def read(self, name: str) -> Tensor:
        """Return one tensor dequantised to float32. Raises `ModelNotSupported` for a type that cannot be."""
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelNotSupported(
                f"{self.path}: tensor {name} is of type {tensor.tensor_type.name}, which cannot be dequantised."
            ) from error
        # Unquantised tensors come as a read-only view of the file, which torch has no type for.
        values = values if values.flags.writeable else values.copy()
        return torch.from_numpy(values).reshape(self.shapes[name])

    def config(self) -> tuple[ModelConfig, Family]:
        """Read the model's configuration; its dtype is bfloat16, for a quantised file has none of its own.

        Raises `ModelNotSupported` naming what the engine cannot run, and `ModelFileInvalid` for a missing key.
        """
        architecture = self.metadata("general.architecture")
        family = GGUF_FAMILIES.get(architecture)
        if family is None:
            raise ModelNotSupported(f"{self.path}: the engine does not run {architecture!r}.", hint=_SUPPORTED)
        self._refuse_unsupported(architecture)
        heads = self._number(f"{architecture}.attention.head_count", int)
        hidden_size = self._number(f"{architecture}.embedding_length", int)
        head_dim = self._number(f"{architecture}.attention.key_length", int, hidden_size // heads)
        rotated = self._number(f"{architecture}.rope.dimension_count", int, head_dim)
        if rotated != head_dim:
            raise ModelNotSupported(
                f"{self.path}: rotary embedding of {rotated} of {head_dim} dimensions does not run."
            )
        names = family.names
        vocab_size = self.shapes.get(f"{names.embedding}.weight", (0,))[0]
        config = ModelConfig(
            architecture=architecture,
            vocab_size=self._number(f"{architecture}.vocab_size", int, vocab_size),
            hidden_size=hidden_size,
            intermediate_size=self._number(f"{architecture}.feed_forward_length", int),
            layers=(LayerConfig(self._rope(architecture, head_dim)),)
            * self._number(f"{architecture}.block_count", int),
            num_heads=heads,
            num_kv_heads=self._number(f"{architecture}.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            max_position_embeddings=self._number(f"{architecture}.context_length", int),
            rms_norm_eps=self._number(f"{architecture}.attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings=f"{names.lm_head}.weight" not in self.shapes,
            qkv_bias=f"{names.qkv[0].format(layer=0)}.bias" in self.shapes,
            attention_out_bias=f"{names.attention_out.format(layer=0)}.bias" in self.shapes,
            mlp_bias=f"{names.down.format(layer=0)}.bias" in self.shapes,
            dtype=torch.bfloat16,
            attention_scale=head_dim**-0.5,
        )
        return config, family

    def _number(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        value = self.metadata(key)
        if value is None:
            value = default
        if isinstance(value, list):
            raise ModelNotSupported(f"{self.path}: {key} differs between layers, which does not run.")
        if value is None or isinstance(value, str) or value <= 0:
            raise ModelFileInvalid(f"{self.path}: the metadata's {key} is {value!r}, not a positive number.")
        return kind(value)

    def _refuse_unsupported(self, architecture: str) -> None:
        if self.metadata(f"{architecture}.expert_count"):
            raise ModelNotSupported(f"{self.path}: a mixture of experts does not run.", hint=_SUPPORTED)
        if self.metadata(f"{architecture}.attention.sliding_window"):
            raise ModelNotSupported(f"{self.path}: sliding-window attention does not run.", hint=_SUPPORTED)

    def _rope(self, architecture: str, head_dim: int) -> RopeConfig:
        theta = self._number(f"{architecture}.rope.freq_base", float, 10000.0)
        kind = self.metadata(f"{architecture}.rope.scaling.type") or "none"
        if kind == "linear":
            return RopeConfig(
                head_dim, "linear", theta, factor=self._number(f"{architecture}.rope.scaling.factor", float)
            )
        if kind != "none":
            raise ModelNotSupported(f"{self.path}: rotary embedding of type {kind!r} does not run.")
        if "rope_freqs.weight" in self.shapes:
            factors = tuple(self.read("rope_freqs.weight").tolist())
            return RopeConfig(head_dim, "factors", theta, frequency_factors=factors)
        return RopeConfig(head_dim, "default", theta)
