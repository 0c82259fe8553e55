"""GGUF files: metadata, and quantised tensors to floating point.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid


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
