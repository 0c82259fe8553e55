"""Checkpoints whose linears come quantised: in the layouts that the kernels multiply, or dequantised.

float8   `X.weight` float8_e4m3fn `[out_features, in_features]` and `X.weight_scale_inv`, a factor for each block of 128
         by 128: DeepSeek-V3's layout
AWQ      `X.qweight` int32 `[in_features, out_features / 8]`, eight outputs a word, the even ones before the odd ones;
         `X.qzeros` `[num_groups, out_features / 8]` alike; `X.scales` `[num_groups, out_features]`: AutoAWQ's GEMM
GPTQ     `X.qweight` int32 `[in_features / 8, out_features]`, eight inputs a word, in order; `X.qzeros` as AWQ's, but in
         order and, but for version 2, less one; `X.scales` as AWQ's; `X.g_idx` `[in_features]`, each input's group:
         AutoGPTQ's

Which linears are quantised is told by the tensors that there are: the rest has a `weight` as ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.pages import empty_in_own_pages
from engine.loader.sources import TensorSource
from kernels.quantize import dequantize
from kernels.reference_quantized import (
    FLOAT8_BLOCK,
    INT4_RUN,
    INT4_SYMMETRIC_ZERO,
    Float8Weight,
    Int4Weight,
    pack_int4,
)

Shapes = Mapping[str, tuple[int, ...]]

# Of a weight that is unpacked at a time; a multiple of FLOAT8_BLOCK.
_ROWS_AT_A_TIME = 1024
_VALUES_OF_A_WORD = 8
_BITS = 4
# Which of its eight values each place of a word holds, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GPTQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


class StoredLinear(Protocol):
    """A linear's weight as a checkpoint has it, on the CPU; its tensors may be views of the mapped file."""

    def packed(self, device: torch.device) -> Int4Weight | Float8Weight:
        """Return all of it on `device`, in tensors of its own."""

    def rows(self, start: int, stop: int) -> Int4Weight | Float8Weight:
        """Return some outputs of it; `start` is a multiple of `_ROWS_AT_A_TIME`."""


class QuantizedLayout(Protocol):
    """How a checkpoint stores quantised linears: its tensors are named after their module, with these suffixes."""

    @property
    def kind(self) -> type[Int4Weight] | type[Float8Weight]:
        """What they are multiplied as."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the tensors that make up a linear, first the one by which it is known."""

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        """Return a module's out_features and in_features; raise `ModelFileInvalid` if its tensors do not agree."""

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return what one takes where it is multiplied as it is."""

    def read(self, module: str, source: TensorSource) -> StoredLinear: ...


class QuantizedTensors:
    """A checkpoint's tensors as if no linear were quantised: a `TensorSource`.

    A quantised linear has a `weight`, which is dequantised to `dtype` when it is read: rounded once, from float32.
    """

    def __init__(self, source: TensorSource, layout: QuantizedLayout, dtype: torch.dtype) -> None:
        self.layout = layout
        self._source = source
        self._dtype = dtype
        telltale = layout.suffixes[0]
        self._modules = {
            module: layout.shape(module, source.shapes)
            for module in (name.removesuffix(telltale) for name in source.shapes if name.endswith(telltale))
        }
        if not self._modules:
            raise ModelFileInvalid(f"Weights are quantised, says the configuration, but no tensor ends in {telltale}.")
        hidden = {f"{module}{suffix}" for module in self._modules for suffix in layout.suffixes}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: shape for name, shape in source.shapes.items() if name not in hidden
        }
        self.shapes |= {f"{module}.weight": shape for module, shape in self._modules.items()}

    @property
    def quantized_bytes(self) -> dict[str, int]:
        """What the weight of that name takes where it is multiplied as it is, of all that are quantised."""
        return {f"{module}.weight": self.layout.num_bytes(*shape) for module, shape in self._modules.items()}

    def is_quantized(self, module: str) -> bool:
        return module in self._modules

    def packed(self, module: str, device: torch.device) -> Int4Weight | Float8Weight:
        """Return a quantised linear's weight as the kernels multiply it."""
        return self.layout.read(module, self._source).packed(device)

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU, dequantised, or in the file's own dtype."""
        module = name.removesuffix(".weight")
        if module == name or module not in self._modules:
            tensor = self._source.read(name)
            if tensor.dtype == torch.float8_e4m3fn:
                raise ModelFileInvalid(f"Tensor {name} is float8, and the checkpoint has no scales of it.")
            return tensor
        stored = self.layout.read(module, self._source)
        weight = empty_in_own_pages(self._modules[module], self._dtype, torch.device("cpu"))
        for start in range(0, len(weight), _ROWS_AT_A_TIME):
            stop = min(start + _ROWS_AT_A_TIME, len(weight))
            weight[start:stop] = dequantize(stored.rows(start, stop))
        return weight


@dataclass(frozen=True, slots=True)
class Float8Layout:
    """DeepSeek-V3's: see the module."""

    @property
    def kind(self) -> type[Float8Weight]:
        return Float8Weight

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ".weight_scale_inv", ".weight"

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        out_features, in_features = _matrix(f"{module}.weight", shapes)
        blocks = (-(-out_features // FLOAT8_BLOCK), -(-in_features // FLOAT8_BLOCK))
        _check(f"{module}.weight_scale_inv", blocks, shapes)
        return out_features, in_features

    def num_bytes(self, out_features: int, in_features: int) -> int:
        blocks = -(-out_features // FLOAT8_BLOCK) * -(-in_features // FLOAT8_BLOCK)
        return out_features * in_features + blocks * torch.float32.itemsize

    def read(self, module: str, source: TensorSource) -> StoredLinear:
        values, scales = source.read(f"{module}.weight"), source.read(f"{module}.weight_scale_inv")
        if values.dtype != torch.float8_e4m3fn:
            raise ModelFileInvalid(f"Tensor {module}.weight is {values.dtype}, and there are scales of it for float8.")
        return _StoredFloat8(values, scales.float())


class _StoredFloat8:
    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self._values = values
        self._scales = scales

    def packed(self, device: torch.device) -> Float8Weight:
        return Float8Weight(self._values.to(device, copy=True), self._scales.to(device, copy=True))

    def rows(self, start: int, stop: int) -> Float8Weight:
        blocks = slice(start // FLOAT8_BLOCK, -(-stop // FLOAT8_BLOCK))
        return Float8Weight(self._values[start:stop], self._scales[blocks])


@dataclass(frozen=True, slots=True)
class Int4Layout:
    """AWQ's, where `interleaved`, or GPTQ's: see the module.

    `group_size` None is one group of all inputs. `zero_offset` is what is added to a stored zero point. `symmetric`: no
    group has another zero point than 8, as far as the configuration says; the tensors count. `reordered`: the tensors
    have to show that inputs are in groups of neighbours after all.
    """

    interleaved: bool
    group_size: int | None
    zero_offset: int = 0
    symmetric: bool = False
    reordered: bool = False

    @property
    def kind(self) -> type[Int4Weight]:
        return Int4Weight

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ".qweight", ".qzeros", ".scales", ".g_idx"

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        rows, columns = _matrix(f"{module}.qweight", shapes)
        in_features = rows if self.interleaved else rows * _VALUES_OF_A_WORD
        out_features = columns * _VALUES_OF_A_WORD if self.interleaved else columns
        group_size = self.group_size or in_features
        if in_features % group_size or group_size % INT4_RUN or out_features % _VALUES_OF_A_WORD:
            raise ModelNotSupported(
                f"{module} has {in_features} inputs in groups of {group_size}, and {out_features} outputs: groups have "
                f"to be multiples of {INT4_RUN} and all alike, and outputs a multiple of {_VALUES_OF_A_WORD}."
            )
        groups = in_features // group_size
        _check(f"{module}.scales", (groups, out_features), shapes)
        _check(f"{module}.qzeros", (groups, out_features // _VALUES_OF_A_WORD), shapes)
        if self.reordered or f"{module}.g_idx" in shapes:
            _check(f"{module}.g_idx", (in_features,), shapes)
        return out_features, in_features

    def num_bytes(self, out_features: int, in_features: int) -> int:
        groups = in_features // (self.group_size or in_features)
        of_a_group = torch.float16.itemsize + (0 if self.symmetric else 1)
        return out_features * (in_features // 2 + groups * of_a_group)

    def read(self, module: str, source: TensorSource) -> StoredLinear:
        words, scales = source.read(f"{module}.qweight"), source.read(f"{module}.scales")
        stored_zeros = source.read(f"{module}.qzeros")
        in_features = len(words) if self.interleaved else len(words) * _VALUES_OF_A_WORD
        if f"{module}.g_idx" in source.shapes:
            _check_order(module, source.read(f"{module}.g_idx"), in_features // len(scales))
        zeros = _unpacked(stored_zeros, _AWQ_ORDER if self.interleaved else _GPTQ_ORDER) + self.zero_offset
        symmetric = bool((zeros == INT4_SYMMETRIC_ZERO).all())
        return _StoredInt4(words, scales, None if symmetric else zeros, self.interleaved)


class _StoredInt4:
    def __init__(self, words: Tensor, scales: Tensor, zeros: Tensor | None, interleaved: bool) -> None:
        self._words = words
        self._scales = scales
        self._zeros = zeros
        self._interleaved = interleaved

    def packed(self, device: torch.device) -> Int4Weight:
        words, out_features = self._words.to(device), self._scales.shape[1]
        values = [
            self._values(words, start, min(start + _ROWS_AT_A_TIME, out_features))
            for start in range(0, out_features, _ROWS_AT_A_TIME)
        ]
        zeros = None if self._zeros is None else self._zeros.to(device)
        return Int4Weight(torch.cat(values), self._scales.to(device, copy=True), zeros)

    def rows(self, start: int, stop: int) -> Int4Weight:
        zeros = None if self._zeros is None else self._zeros[:, start:stop]
        return Int4Weight(self._values(self._words, start, stop), self._scales[:, start:stop], zeros)

    def _values(self, words: Tensor, start: int, stop: int) -> Tensor:
        if self._interleaved:
            values = _unpacked(words[:, start // _VALUES_OF_A_WORD : stop // _VALUES_OF_A_WORD], _AWQ_ORDER).T
        else:
            values = _unpacked(words[:, start:stop].T, _GPTQ_ORDER)
        return pack_int4(values.contiguous())


def _unpacked(words: Tensor, order: Sequence[int]) -> Tensor:
    """Return `[rows, columns]` int32 as `[rows, 8 * columns]` uint8."""
    parts = [(words >> _BITS * order.index(value) & 0xF).to(torch.uint8) for value in range(_VALUES_OF_A_WORD)]
    return torch.stack(parts, dim=2).flatten(1)


def _check_order(module: str, groups: Tensor, group_size: int) -> None:
    """Inputs in the order of their activations belong to groups all over the weight, which no kernel here reads."""
    if not torch.equal(groups.long(), torch.arange(len(groups)) // group_size):
        raise ModelNotSupported(
            f"{module} was quantised in the order of its activations (desc_act): its groups are out of order.",
            hint="Take a checkpoint that was made without desc_act, or with static groups.",
        )


def _matrix(name: str, shapes: Shapes) -> tuple[int, int]:
    if name not in shapes:
        raise ModelFileInvalid(f"The checkpoint lacks tensors: {name}.")
    shape = shapes[name]
    if len(shape) != 2:
        raise ModelFileInvalid(f"Tensor {name} is {shape}, not a matrix.")
    return shape[0], shape[1]


def _check(name: str, expected: tuple[int, ...], shapes: Shapes) -> None:
    if name not in shapes:
        raise ModelFileInvalid(f"The checkpoint lacks tensors: {name}.")
    if shapes[name] != expected:
        raise ModelFileInvalid(f"Tensor {name} is {shapes[name]}, but its module's others say {expected}.")
