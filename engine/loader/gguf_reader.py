"""The container of a GGUF file: its metadata, and where in the file its tensors lie.

gguf-py's own reader makes several array views of every element of every list, which for the vocabulary of a Llama 3
are half a million elements and ten seconds; its tables of types and its dequantisation are what is used of it.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

from engine.loader.errors import ModelFileInvalid

_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class GgufTensor(NamedTuple):
    """One tensor's place in the file: `shape` in torch's order, `bytes_shape` the same with rows in stored bytes."""

    shape: tuple[int, ...]
    bytes_shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int


class GgufContainer:
    """A GGUF file mapped into memory. Raises `ModelFileInvalid` if it is none, or truncated.

    `metadata` maps keys to numbers, strings, booleans and lists of them.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _Parser(self._mapping).parse()
        except (ValueError, IndexError, OSError, struct.error) as error:
            raise ModelFileInvalid(
                f"{path} is no GGUF file, or truncated ({error}).", hint="Fetch it again."
            ) from error

    def stored(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored, `bytes_shape` uint8: a read-only view of the file."""
        tensor = self.tensors[name]
        count = math.prod(tensor.bytes_shape)
        return np.frombuffer(self._mapping, np.uint8, count, tensor.offset).reshape(tensor.bytes_shape)

    def forget(self, name: str) -> None:
        """Let the pages of a tensor that was read leave the process's memory; the file still has them."""
        tensor = self.tensors[name]
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = tensor.offset + math.prod(tensor.bytes_shape)
        if end > start:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


class _Parser:
    """Reads a file's front, from `place` on. Raises ValueError, IndexError or struct.error where it makes no sense."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._number("I") != GGUF_MAGIC:
            raise ValueError("its first bytes are not GGUF's")
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"version {version} is none of {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(GGUFValueType(self._number("I"))) for _ in range(num_keys)}
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{_ALIGNMENT} is {alignment!r}")
        start = -(-self._place // alignment) * alignment
        return metadata, {name: self._placed(name, tensor, start) for name, tensor in infos}

    def _tensor_info(self) -> tuple[str, GgufTensor]:
        name = self._string()
        # ggml counts dimensions from the one that is contiguous in memory.
        shape = tuple(reversed(self._numbers("Q", self._number("I"))))
        kind = GGMLQuantizationType(self._number("I"))
        return name, GgufTensor(shape, quant_shape_to_byte_shape(shape, kind), kind, self._number("Q"))

    def _placed(self, name: str, tensor: GgufTensor, start: int) -> GgufTensor:
        placed = tensor._replace(offset=start + tensor.offset)
        if placed.offset + math.prod(placed.bytes_shape) > len(self._data):
            raise ValueError(f"tensor {name} ends behind the file's end")
        return placed

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            element, count = GGUFValueType(self._number("I")), self._number("Q")
            if element in _NUMBERS:
                return list(self._numbers(_NUMBERS[element], count))
            return [self._value(element) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _string(self) -> str:
        length = self._number("Q")
        text = self._data[self._place : self._place + length]
        if len(text) < length:
            raise ValueError("a string ends behind the file's end")
        self._place += length
        return text.decode()

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self._data, self._place)
        self._place += struct.calcsize(f"<{count}{code}")
        return values
