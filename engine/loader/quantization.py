"""From a config.json's `quantization_config` to the layout of a checkpoint's quantised linears."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.fields import Fields
from engine.loader.headless import BodyTensors
from engine.loader.json_file import read_json
from engine.loader.quantized import Float8Layout, Int4Layout, QuantizedLayout, QuantizedTensors
from engine.loader.sources import SafetensorsSource, TensorSource
from kernels.reference_quantized import FLOAT8_BLOCK

_BLOCK = [FLOAT8_BLOCK, FLOAT8_BLOCK]
_SERVED = (
    "Quantised checkpoints that run: awq (gemm, 4 bits), gptq (4 bits, without desc_act), fp8 (blocks of 128 by 128, "
    "activations quantised dynamically), mxfp4 (gpt-oss); and GGUF files."
)


def quantization_method(raw: Mapping[str, Any]) -> str | None:
    """Return what a config.json says its weights are quantised with, or None where they are not."""
    described = raw.get("quantization_config")
    if not described:
        return None
    return str(described.get("quant_method")) if isinstance(described, dict) else str(described)


def read_quantization(raw: Mapping[str, Any], path: Path) -> QuantizedLayout | None:
    """Return the layout that a config.json of `path` describes; None for weights that are not quantised.

    Raises `ModelNotSupported` saying what of it is not served, and `ModelFileInvalid` for a field that is wrong.
    """
    method = quantization_method(raw)
    if method is None:
        return None
    described = raw["quantization_config"]
    readers: dict[str, Callable[[_Description], QuantizedLayout]] = {"awq": _awq, "fp8": _float8, "gptq": _gptq}
    if method not in readers or not isinstance(described, dict):
        raise ModelNotSupported(f"{path}: weights quantised with {method} do not run.", hint=_SERVED)
    return readers[method](_Description(described, path, method))


def folder_tensors(folder: Path, dtype: torch.dtype) -> TensorSource:
    """Return the tensors of a folder of safetensors files, as a model with a head has them.

    Quantised linears are dequantised to `dtype` where they are read as tensors, see `QuantizedTensors`.
    """
    path = folder / "config.json"
    raw = read_json(path)
    tensors = BodyTensors(SafetensorsSource(folder))
    layout = None if quantization_method(raw) == "mxfp4" else read_quantization(raw, path)
    return tensors if layout is None else QuantizedTensors(tensors, layout, dtype)


class _Description:
    """The fields of a `quantization_config`."""

    def __init__(self, values: Mapping[str, Any], path: Path, method: str) -> None:
        self._values = values
        self._path = path
        self._method = method

    def value(self, *names: str) -> Any:
        """Return the first of these spellings that there is, or None."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def require(self, *names: str, one_of: tuple[Any, ...]) -> Any:
        """Return the field of these spellings, or None for none of them; refuse what is not among `one_of`."""
        value = self.value(*names)
        value = value.lower() if isinstance(value, str) else value
        if value not in one_of:
            raise ModelNotSupported(
                f"{self._path}: weights quantised with {self._method} and {names[0]} {value} do not run.", hint=_SERVED
            )
        return value

    def group_size(self) -> int | None:
        size = self.value("group_size", "q_group_size")
        if size == -1:
            return None
        return Fields({"group_size": size}, self._path).integer("group_size", 128)

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool | None):
            raise ModelFileInvalid(f"{self._path}: {name} is {value!r}, not true or false.")
        return bool(value)


def _awq(described: _Description) -> Int4Layout:
    described.require("bits", "w_bit", one_of=(4, None))
    described.require("version", "format", "checkpoint_format", one_of=("gemm", None))
    described.require("zero_point", one_of=(True, None))
    return Int4Layout(interleaved=True, group_size=described.group_size())


def _gptq(described: _Description) -> Int4Layout:
    described.require("bits", one_of=(4,))
    # Linears of other bits and groups than the rest.
    described.require("dynamic", one_of=({}, None))
    described.require("is_marlin_format", one_of=(False, None))
    version = described.require("checkpoint_format", "format", one_of=("gptq", "gptq_v2", None))
    return Int4Layout(
        interleaved=False,
        group_size=described.group_size(),
        zero_offset=0 if version == "gptq_v2" else 1,
        symmetric=described.flag("sym"),
        reordered=described.flag("desc_act"),
    )


def _float8(described: _Description) -> Float8Layout:
    described.require("weight_block_size", one_of=(_BLOCK,))
    described.require("activation_scheme", one_of=("dynamic", None))
    described.require("fmt", one_of=("e4m3", None))
    return Float8Layout()
