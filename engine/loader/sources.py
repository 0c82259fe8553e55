"""Where tensors come from: files that are mapped into memory and give one tensor at a time."""

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.json_file import read_json

_NAMES_SHOWN = 5
# AWQ's and GPTQ's: see `engine.loader.quantized`.
_INTEGERS = (".qweight", ".qzeros", ".g_idx")
# What is read through one mapping of a file; opening it again costs about a millisecond.
_MAPPED_BYTES = 16 << 20


class TensorSource(Protocol):
    """A checkpoint's tensors by name."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, known without reading them."""

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, in the file's own dtype. It may be a view of the mapped file."""


def check_shapes(source: TensorSource, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise `ModelFileInvalid` if `source` lacks one of these tensors, or has one of another shape."""
    if missing := [name for name in expected if name not in source.shapes]:
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise ModelFileInvalid(f"The checkpoint lacks tensors: {', '.join(missing[:_NAMES_SHOWN])}{more}.")
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise ModelFileInvalid(f"Tensor {name} is {source.shapes[name]}, but the configuration says {shape}.")


class SafetensorsSource:
    """A folder of safetensors files. Raises `ModelFileInvalid` if one is corrupt or missing."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, _MappedFile] = {}
        for path in _files(folder):
            file = _MappedFile(path)
            shapes = file.shapes()
            self.shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)

    def read(self, name: str) -> Tensor:
        tensor = self._files[name].read(name)
        # Bytes are MXFP4's: a checkpoint with any other use for them has been refused, by its configuration or shapes.
        served = tensor.is_floating_point() or tensor.dtype == torch.uint8 or name.endswith(_INTEGERS)
        if not served:
            raise ModelNotSupported(
                f"Tensor {name} of {self._files[name].path} is {tensor.dtype}, which no layout that runs has there."
            )
        return tensor


class _MappedFile:
    """A file mapped into memory, and mapped anew now and then.

    Pages that were read stay in the process's memory for as long as their mapping does: a model read through one
    mapping takes its size twice, once copied and once mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        try:
            return {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise self._unreadable(error) from error

    def read(self, name: str) -> Tensor:
        if self._bytes_read >= _MAPPED_BYTES:
            self._open()
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(error) from error
        self._bytes_read += tensor.nbytes
        return tensor

    def _open(self) -> None:
        try:
            self._file: Any = safe_open(self.path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from error
        self._bytes_read = 0

    def _unreadable(self, error: Exception) -> ModelFileInvalid:
        return ModelFileInvalid(f"{self.path} is corrupt or truncated ({error}).", hint="Fetch it again.")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFileInvalid(f"{index} has no weight_map.")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [path.name for path in files if not path.exists()]:
            raise ModelFileInvalid(f"{index} names files that are not there: {', '.join(missing)}.")
        return files
    # Mistral's repositories hold the same weights a second time, in a layout of their own.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        raise ModelFileInvalid(
            f"{folder} holds no .safetensors file.",
            hint="Pickled weights (.bin, .pt) can run code and are never loaded: convert them to safetensors.",
        )
    return files
