"""Weights that are quantised and joined when they are loaded, against their definitions."""

import pytest
import torch

from kernels import quantize, reference_quantized
from kernels.reference_quantized import Float8Weight, Int4Weight


def _random(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("inputs", "size"), [(384, 128), (192, 64), (96, 32), (112, None), (8, None)])
def test_the_largest_group_that_divides_the_inputs_is_taken(inputs: int, size: int | None) -> None:
    assert quantize.int4_group_size(inputs) == size


def test_a_weight_is_quantised_part_by_part_as_it_would_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _random(300, 256)
    monkeypatch.setattr(quantize, "_ROWS_AT_A_TIME", 128)
    for part, whole in zip(
        quantize.quantize_int4(weight, 64), reference_quantized.quantize_int4(weight, 64), strict=True
    ):
        assert torch.equal(part, whole)
    values, scales = quantize.quantize_float8(weight)
    wanted = reference_quantized.quantize_float8_weight(weight)
    assert torch.equal(values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(scales, wanted.scales)


def test_neighbours_in_four_bits_are_joined_whatever_their_zero_points() -> None:
    first, second = (reference_quantized.quantize_int4(_random(40, 64, seed), 32) for seed in (0, 1))
    symmetric = second._replace(zeros=None)
    (joined,) = quantize.join_neighbours([first, symmetric, first])
    wanted = torch.cat([quantize.dequantize(part) for part in (first, symmetric, first)])
    assert isinstance(joined, Int4Weight)
    assert torch.equal(quantize.dequantize(joined), wanted)
    (without,) = quantize.join_neighbours([symmetric, symmetric])
    assert isinstance(without, Int4Weight)
    assert without.zeros is None


def test_groups_of_two_sizes_stay_apart() -> None:
    parts = [reference_quantized.quantize_int4(_random(40, 64), size) for size in (32, 64)]
    assert quantize.join_neighbours(parts) == parts


def test_float8_is_joined_where_whole_blocks_end() -> None:
    parts = [reference_quantized.quantize_float8_weight(_random(size, 200, size)) for size in (128, 72, 256)]
    first, second = quantize.join_neighbours(parts)
    assert isinstance(first, Float8Weight)
    assert isinstance(second, Float8Weight)
    assert (len(first.values), len(second.values)) == (200, 256)
    restored = torch.cat([quantize.dequantize(part) for part in (first, second)])
    assert torch.equal(restored, torch.cat([quantize.dequantize(part) for part in parts]))


def test_weights_of_several_kinds_keep_their_order() -> None:
    plain, packed = _random(8, 64), reference_quantized.quantize_int4(_random(8, 64, 1), 32)
    joined = quantize.join_neighbours([plain, plain, packed])
    assert [type(part) for part in joined] == [torch.Tensor, Int4Weight]
    assert torch.equal(joined[0], torch.cat([plain, plain]))
