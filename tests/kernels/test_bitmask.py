"""Masks of the vocabulary against a loop over their bits."""

import math

import pytest
import torch

from kernels.bitmask import apply_token_bitmask


@pytest.mark.parametrize("vocab_size", [64, 61, 100])
@pytest.mark.parametrize("rows", [[0, 1, 2], [1]])
def test_a_logit_survives_only_where_its_bit_is_set(vocab_size, rows):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab_size, generator=generator)
    # Of the 64 tokens that two words hold, the sign bits among them, and of 100 the last 36 have no bit at all.
    bitmask = torch.randint(-(2**31), 2**31, (len(rows), 2), generator=generator).int()
    expected = logits.clone()
    for mask, row in zip(bitmask.tolist(), rows, strict=True):
        for token in range(vocab_size):
            if token >= 64 or not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = -math.inf
    assert torch.isinf(expected).any()
    apply_token_bitmask(logits, bitmask, torch.tensor(rows))
    assert torch.equal(logits, expected)


def test_the_dtype_of_the_logits_does_not_matter():
    logits = torch.zeros(1, 40, dtype=torch.bfloat16)
    apply_token_bitmask(logits, torch.tensor([[-(2**31), 1]], dtype=torch.int32), torch.tensor([0]))
    assert torch.isfinite(logits)[0].nonzero().flatten().tolist() == [31, 32]


def test_more_rows_than_are_unpacked_at_a_time():
    logits = torch.zeros(200, 32)
    # Row r allows token r % 32 alone; as an int32, bit 31 is the sign.
    bitmask = torch.tensor([[1 << row % 32] for row in range(200)]).int()
    apply_token_bitmask(logits[1:], bitmask[1:], torch.arange(199))
    assert logits[1:].argmax(dim=-1).tolist() == [row % 32 for row in range(1, 200)]
    apply_token_bitmask(logits[:150], bitmask[:149], torch.arange(149))
    assert torch.isfinite(logits[149]).sum() == 1
    assert torch.isinf(logits).sum() == 200 * 31


def test_what_is_not_a_number_stays_so():
    logits = torch.full((1, 32), math.nan)
    apply_token_bitmask(logits, torch.tensor([[1]], dtype=torch.int32), torch.tensor([0]))
    assert torch.isnan(logits).all()
