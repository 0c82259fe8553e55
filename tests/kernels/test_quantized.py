"""Layouts of quantised weights: what is stored, and what it stands for."""

import pytest
import torch

from kernels import reference_quantized as quantized
from kernels.reference_quantized import Int4Weight


def test_a_word_holds_every_eighth_of_32_inputs() -> None:
    values = torch.randint(16, (2, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = quantized.pack_int4(values)
    assert packed.shape == (2, 16)
    nibbles = values.tolist()
    # Of the second row the second run, and of that the fourth word.
    word = [nibbles[1][32 + place + 3] for place in (0, 8, 16, 24)]
    assert packed[1, 8 + 3].item() & 0xFFFF == word[0] | word[1] << 4 | word[2] << 8 | word[3] << 12
    assert torch.equal(quantized.unpack_int4(packed), values)


@pytest.mark.parametrize("group_size", [32, 96, 192])
def test_a_weight_in_four_bits_is_off_by_half_a_level_at_most(group_size: int) -> None:
    weight = torch.randn(10, 192, generator=torch.Generator().manual_seed(0))
    packed = quantized.quantize_int4(weight, group_size)
    assert (packed.in_features, packed.out_features, packed.group_size) == (192, 10, group_size)
    error = (quantized.dequantize_int4(packed) - weight).unflatten(1, (-1, group_size)).abs().amax(2)
    assert (error <= packed.scales.T * 0.5001).all()
    assert error.max() > 0


def test_no_zero_points_mean_eight() -> None:
    weight = quantized.quantize_int4(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), 32)
    eights = Int4Weight(weight.values, weight.scales, torch.full_like(weight.scales, 8, dtype=torch.uint8))
    assert torch.equal(quantized.dequantize_int4(weight._replace(zeros=None)), quantized.dequantize_int4(eights))
    assert quantized.dequantize_int4(eights).min() < 0


def test_a_group_of_zeros_stays_zero_in_four_bits_and_in_float8() -> None:
    weight = torch.randn(130, 256, generator=torch.Generator().manual_seed(0))
    weight[:, :128] = 0
    assert not quantized.dequantize_int4(quantized.quantize_int4(weight, 64))[:, :128].any()
    values, scales = quantized.quantize_float8_weight(weight)
    assert not values[:, :128].float().any()
    assert (scales > 0).all()
    values, scales = quantized.quantize_float8_groups(weight)
    assert not values[:, :128].float().any()
    assert (scales > 0).all()


def test_float8_products_are_those_of_numbers_within_a_sixteenth() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 200, generator=generator), torch.randn(130, 200, generator=generator)
    x[2] *= 1e4
    values, scales = quantized.quantize_float8_groups(x)
    restored = values.float() * scales.T.repeat_interleave(128, 1)[:, :200]
    # Of three bits of mantissa, and of what is subnormal beside a scale.
    assert ((restored - x).abs() <= x.abs() / 16 + scales.T.repeat_interleave(128, 1)[:, :200] * 2**-10).all()
    product = quantized.float8_linear(x, quantized.quantize_float8_weight(weight), torch.ones(130))
    exact = x @ weight.T + 1
    assert ((product - exact).norm(dim=1) < 0.05 * exact.norm(dim=1)).all()
