"""MXFP4 weights against Transformers' own dequantisation, and against the format's definition."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.loader.mxfp4 import dequantize_mxfp4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_blocks_are_what_transformers_makes_of_them(dtype):
    blocks = torch.randint(0, 256, (3, 24, 5, 16), dtype=torch.uint8)
    scales = torch.randint(1, 248, (3, 24, 5), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    for expert in range(3):
        ours = dequantize_mxfp4(blocks[expert], scales[expert], dtype)
        assert ours.dtype == dtype
        # Theirs multiplies from the left.
        assert torch.equal(ours, theirs[expert].T)


def test_the_low_half_of_a_byte_comes_first_and_zero_is_the_smallest_scale():
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0x7F, 0x80])
    blocks[0, 1, 15] = 0x2A
    weight = dequantize_mxfp4(blocks, torch.tensor([[129, 0]], dtype=torch.uint8), torch.float32)
    assert weight.shape == (1, 64)
    assert weight[0, :6].tolist() == [2.0, 4.0, -24.0, 24.0, 0.0, -0.0]
    assert weight[0, 62:].tolist() == [-(2.0**-127), 2.0**-127]
    assert weight.count_nonzero() == 6


@pytest.mark.parametrize("scale", [1, 100, 127, 200, 250])
def test_bfloat16_holds_every_value_exactly(scale):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.full((1, 16), scale, dtype=torch.uint8)
    exact = dequantize_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16).float(), exact)
    assert exact.unique().tolist() == [
        value * 2.0 ** (scale - 127) for value in (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6)
    ]
