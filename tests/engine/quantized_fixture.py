"""Checkpoints in the layouts that others write, made of a saved model: written from the layouts' public definitions.

Each comes with the numbers that it stands for, as a checkpoint that is not quantised.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# What is left as it is, beside norms.
KEPT = ("embed_tokens", "lm_head", "block_sparse_moe.gate")
# AutoAWQ packs the outputs of a word in this order.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

Quantizer = Callable[[str, tuple[int, int], torch.Generator], tuple[dict[str, Tensor], Tensor]]


def requantized(
    folder: Path, target: Path, quantizer: Quantizer, config: dict[str, Any], kept: tuple[str, ...] = KEPT
) -> tuple[Path, Path]:
    """Write the model of `folder` with other linears, of random numbers: quantised, and what they stand for."""
    generator = torch.Generator().manual_seed(0)
    quantized, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module.endswith(kept):
            quantized[name] = plain[name] = tensor
            continue
        tensors, numbers = quantizer(module, (tensor.shape[0], tensor.shape[1]), generator)
        quantized |= tensors
        plain[name] = numbers
    description = json.loads((folder / "config.json").read_text())
    for part, tensors, more in (("quantized", quantized, {"quantization_config": config}), ("plain", plain, {})):
        shutil.copytree(folder, target / part)
        save_file(tensors, target / part / "model.safetensors", metadata={"format": "pt"})
        (target / part / "config.json").write_text(json.dumps({**description, **more}))
    return target / "quantized", target / "plain"


def awq(folder: Path, target: Path, *, group_size: int = 32, **config: Any) -> tuple[Path, Path]:
    def quantizer(module: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        values, zeros, scales = _integers(shape, group_size, generator, 15)
        stored = {"qweight": _pack_columns(values, AWQ_ORDER), "qzeros": _pack_columns(zeros, AWQ_ORDER)}
        tensors = {f"{module}.{name}": tensor for name, tensor in {**stored, "scales": scales}.items()}
        return tensors, _numbers(values, zeros, scales, group_size)

    described = {"bits": 4, "group_size": group_size, "zero_point": True, "version": "GEMM"}
    return requantized(folder, target, quantizer, {"quant_method": "awq", **described, **config})


def gptq(
    folder: Path, target: Path, *, group_size: int = 32, zero_offset: int = 1, shuffled: bool = False, **config: Any
) -> tuple[Path, Path]:
    """`zero_offset` is what the writer takes from zero points; `shuffled` inputs are in groups at random."""

    def quantizer(module: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        values, zeros, scales = _integers(shape, group_size, generator, 15 + zero_offset)
        zeros = torch.full_like(zeros, 8) if config.get("sym") else zeros
        groups = torch.arange(shape[1], dtype=torch.int32) // group_size
        stored = {
            "qweight": _pack_columns(values.T, range(8)).T.contiguous(),
            "qzeros": _pack_columns(zeros - zero_offset, range(8)),
            "scales": scales,
            "g_idx": groups.flip(0) if shuffled else groups,
            # As older writers have them.
            "bias": torch.zeros(shape[0], dtype=torch.float16),
        }
        tensors = {f"{module}.{name}": tensor for name, tensor in stored.items()}
        return tensors, _numbers(values, zeros, scales, group_size)

    described = {"bits": 4, "group_size": group_size, "desc_act": False, "sym": False}
    return requantized(folder, target, quantizer, {"quant_method": "gptq", **described, **config})


def float8(folder: Path, target: Path, **config: Any) -> tuple[Path, Path]:
    def quantizer(module: str, shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        values = (torch.randn(shape, generator=generator) * 64).to(torch.float8_e4m3fn)
        scales = _scales((-(-shape[0] // 128), -(-shape[1] // 128)), generator) / 64
        numbers = torch.empty(shape)
        for row in range(0, shape[0], 128):
            for column in range(0, shape[1], 128):
                block = np.s_[row : row + 128, column : column + 128]
                numbers[block] = values[block].float() * scales[row // 128, column // 128]
        return {f"{module}.weight": values, f"{module}.weight_scale_inv": scales}, numbers

    described = {"weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    return requantized(
        folder, target, quantizer, {"quant_method": "fp8", **described, "modules_to_not_convert": [*KEPT], **config}
    )


def _integers(
    shape: tuple[int, int], group_size: int, generator: torch.Generator, largest_zero: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values `[in_features, out_features]`, and zeros and scales `[num_groups, out_features]`."""
    outputs, inputs = shape
    values = torch.randint(16, (inputs, outputs), generator=generator, dtype=torch.int32)
    groups = (inputs // group_size, outputs)
    zeros = torch.randint(1, largest_zero + 1, groups, generator=generator, dtype=torch.int32)
    return values, zeros, _scales(groups, generator).half()


def _scales(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Of so few digits that bfloat16 holds what they multiply exactly."""
    digits = 1 + torch.randint(4, shape, generator=generator) / 4
    return digits * 2.0 ** -torch.randint(5, 8, shape, generator=generator)


def _pack_columns(values: Tensor, order: Any) -> Tensor:
    """Pack `[rows, columns]` into `[rows, columns / 8]`: place i of a word holds its `order[i]`-th column."""
    columns = values.numpy().astype(np.uint32)
    words = np.zeros((columns.shape[0], columns.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(order):
            words[:, word] |= columns[:, 8 * word + column] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _numbers(values: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    wide = [part.float().repeat_interleave(group_size, 0) for part in (zeros, scales)]
    return ((values.float() - wide[0]) * wide[1]).T.contiguous()
