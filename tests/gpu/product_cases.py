"""Products of matrices against their definitions: four-bit and float8 weights, adapters, experts."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference, reference_quantized
from kernels.experts import StackedExperts
from kernels.lora import LoraShape, LowRank
from kernels.reference_quantized import Int4Weight
from kernels.stacked_lora import empty_low_rank, sort_by_slot
from kernels.triton import experts, fp8, lora, w4a16
from tests.gpu.cases import Setting, close
from tests.gpu.numbers import ULP, Check, dtypes, randn, short, wants_float8


class Product(NamedTuple):
    rows: int
    inputs: int
    outputs: int


class Mixture(NamedTuple):
    rows: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False


# Each with its group size, and whether it is without zero points. The last is multiplied by cuBLAS.
_INT4 = [
    (Product(1, 1920, 40), 32, False),
    (Product(16, 4096, 4096), 128, False),
    (Product(70, 192, 300), 96, True),
    (Product(700, 1024, 512), 128, True),
]
_FLOAT8 = [Product(1, 200, 40), Product(16, 4096, 4096), Product(70, 1000, 300), Product(700, 1024, 512)]
# Each with the outputs of its slices, and a rank.
_LORA = [(1, 100, (70,), 16), (40, 2088, (70, 24, 24), 64), (700, 1024, (512, 512), 16)]
_EXPERTS = [
    Mixture(1, 8, 2, 72, 40),
    Mixture(37, 6, 1, 150, 80, bias=True),
    Mixture(150, 2, 2, 256, 96),
    Mixture(64, 128, 8, 512, 192),
]


def product_cases(setting: Setting) -> Iterator[tuple[str, Check]]:
    """Names, and checks."""
    small = setting.interpreted
    for shape, group_size, symmetric in [(Product(3, 1920, 40), 32, False)] if small else _INT4:
        label = f"w4a16: {_label(shape)}, groups of {group_size}{', symmetric' * symmetric}"
        yield label, partial(_check_int4, setting, shape, group_size, symmetric)
    for shape in [Product(3, 200, 40)] if small else _FLOAT8:
        yield f"fp8: {_label(shape)}", partial(_check_float8, setting, shape)
    for rows, inputs, sizes, rank in [(9, 100, (70, 24), 16)] if small else _LORA:
        for dtype in dtypes(setting):
            label = f"lora: {rows}x{inputs} by {sizes}, rank {rank} {short(dtype)}"
            yield label, partial(_check_lora, setting, rows, inputs, sizes, rank, dtype)
    for mixture in [Mixture(13, 5, 2, 72, 40, bias=True)] if small else _EXPERTS:
        for dtype in dtypes(setting):
            label = f"experts: {', '.join(map(str, mixture))} {short(dtype)}"
            yield label, partial(_check_experts, setting, mixture, dtype)


def _label(shape: Product) -> str:
    return f"{shape.rows}x{shape.inputs} by {shape.outputs}"


def _close_to_rounding(got: Tensor, wanted: Tensor, sums: Tensor, of_sums: float) -> None:
    """`sums` are those of the terms' magnitudes, of which each product may lose so much."""
    off = (got.float() - wanted).abs() - wanted.abs() * ULP[got.dtype] - sums * of_sums
    # Written so that a NaN fails.
    assert bool((off <= 0).all()), f"beyond rounding by {float(off.max()):.3g} in {int((~(off <= 0)).sum())} places"


def _check_int4(setting: Setting, shape: Product, group_size: int, symmetric: bool) -> None:
    x, bias = randn(setting, shape.rows, shape.inputs), randn(setting, shape.outputs)
    # Off centre, so that zero points differ.
    numbers = torch.randn(shape.outputs, shape.inputs) + torch.randn(shape.outputs, 1)
    values, scales, zeros = (
        part.to(setting.device) for part in reference_quantized.quantize_int4(numbers.half(), group_size)
    )
    weight = Int4Weight(values, scales.to(setting.dtype), None if symmetric else zeros)
    wanted = reference_quantized.int4_linear(x.float(), weight, bias.float())
    sums = x.float().abs() @ reference_quantized.dequantize_int4(weight).abs().T
    _close_to_rounding(w4a16.multiply_int4(x, weight, bias), wanted, sums, 4e-6)
    rounded_weight = ULP[x.dtype] if shape.rows > w4a16.DEQUANTIZE_ABOVE else 0.0
    _close_to_rounding(w4a16.int4_linear(x, weight, bias), wanted, sums, 4e-6 + rounded_weight)


def _check_float8(setting: Setting, shape: Product) -> None:
    wants_float8(setting)
    x, bias = randn(setting, shape.rows, shape.inputs), randn(setting, shape.outputs)
    weight = reference_quantized.quantize_float8_weight(randn(setting, shape.outputs, shape.inputs))
    values, scales = fp8.quantize_float8_groups(x)
    wanted_values, wanted_scales = reference_quantized.quantize_float8_groups(x)
    close(scales, wanted_scales, 1e-6)
    # Next to a tie, the neighbour.
    close(values.float(), wanted_values.float(), 0.13, 2**-9)
    assert (values.float() != wanted_values.float()).float().mean() < 0.002
    wanted = reference_quantized.float8_linear(x.float(), weight, bias.float())
    sums = x.float().abs() @ weight.values.float().abs().T * weight.scales.max()
    # Tensor cores keep some 14 bits of a tile's sum.
    _close_to_rounding(fp8.float8_linear(x, weight, bias), wanted, sums, 2**-12)


def _rounding(dtype: torch.dtype) -> float:
    """What a few roundings come to; of float32, far less than products of fewer bits would lose."""
    return 2e-5 if dtype == torch.float32 else 4 * ULP[dtype]


def _check_lora(
    setting: Setting, rows: int, inputs: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    num_slots = 3
    slots = (torch.randint(0, num_slots + 1, (rows,)) - 1).to(setting.device)
    stacked = empty_low_rank(num_slots, rank, LoraShape(inputs, sizes), dtype, setting.device)
    x, y = (randn(setting, rows, size, dtype=dtype) for size in (inputs, sum(sizes)))
    wanted = y.clone()
    for slot in range(num_slots):
        pairs, start = [], 0
        for size in sizes:
            a = randn(setting, rank, inputs, dtype=dtype, scale=inputs**-0.5)
            b = randn(setting, size, rank, dtype=dtype, scale=rank**-0.5)
            pairs.append(LowRank(a, b, start, start + size))
            of_slot = (slots == slot).nonzero().flatten()
            reference.lora_add(x, wanted, of_slot, a, b, slice(start, start + size))
            start += size
        stacked.put(slot, pairs)
    lora.lora_add(x, y, sort_by_slot(slots, num_slots), stacked)
    # The middle, the product and the sum are rounded.
    close(y, wanted, _rounding(dtype), _rounding(dtype))


def _check_experts(setting: Setting, shape: Mixture, dtype: torch.dtype) -> None:
    def weights(*sizes: int) -> Tensor:
        return randn(setting, shape.num_experts, *sizes, dtype=dtype, scale=sizes[-1] ** -0.5)

    doubled = 2 * shape.intermediate_size
    stacked = StackedExperts(
        weights(doubled, shape.hidden_size),
        weights(doubled) if shape.bias else None,
        weights(shape.hidden_size, shape.intermediate_size),
        weights(shape.hidden_size) if shape.bias else None,
        partial(reference.clamped_swiglu, alpha=1.702, limit=7.0) if shape.bias else reference.silu_and_mul,
    )
    shares, expert_ids = torch.randn(shape.rows, shape.num_experts).topk(shape.top_k)
    x = randn(setting, shape.rows, shape.hidden_size, dtype=dtype)
    routed = (x, expert_ids.to(setting.device), shares.softmax(-1).to(setting.device))
    got, wanted = (module.mixture_of_experts(*routed, stacked) for module in (experts, reference))
    # Both products and the activation are rounded, and each may be so to the other side.
    close(got, wanted, _rounding(dtype), _rounding(dtype) * float(wanted.abs().max()))
