"""GGUF files: metadata, and quantised tensors to floating point.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader.gguf_reader import GgufContainer
from engine.loader.pages import empty_in_own_pages

# Of float32 values: gguf-py's dequantisation takes several times as much for intermediate results.
_CHUNK_BYTES = 4 << 20


class GgufFile:
    """An open GGUF file; a `TensorSource`. Raises `ModelFileInvalid` if the file is corrupt or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._container = GgufContainer(path)
        self.shapes = {name: tensor.shape for name, tensor in self._container.tensors.items()}

    def metadata(self, key: str) -> Any:
        """Return the value of `key`, or None where the file has none."""
        return self._container.metadata.get(key)

    def read(self, name: str) -> Tensor:
        """Return one tensor dequantised to float32. Raises `ModelNotSupported` for a type that cannot be."""
        kind, shape = self._container.tensors[name].type, self.shapes[name]
        values = empty_in_own_pages(shape, torch.float32, torch.device("cpu"))
        rows, stored = values.view(-1, shape[-1]).numpy(), self._container.stored(name)
        stored = stored.reshape(len(rows), -1)
        step = max(1, _CHUNK_BYTES // rows[0].nbytes)
        try:
            for start in range(0, len(rows), step):
                rows[start : start + step] = gguf.quants.dequantize(stored[start : start + step], kind)
        except NotImplementedError as error:
            raise ModelNotSupported(
                f"{self.path}: tensor {name} is of type {kind.name}, which cannot be dequantised."
            ) from error
        self._container.forget(name)
        return values
