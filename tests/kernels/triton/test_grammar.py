"""The mask of the vocabulary against the one in torch, which has a test against a loop over its bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import bitmask as defined
from kernels.triton.grammar import apply_token_bitmask


@settings(max_examples=25, derandomize=True)
@given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))),
    st.sampled_from([1, 31, 32, 61, 64, 100, 1000, 4096, 5003]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 99),
)
def test_a_logit_survives_only_where_its_bit_is_set(shape, vocab_size, dtype, seed):
    num_rows, masked = shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
    # Sometimes fewer words than the vocabulary has, and sometimes more.
    num_words = max(1, -(-vocab_size // 32) + seed % 3 - 1)
    bitmask = torch.randint(-(2**31), 2**31, (len(masked), num_words), generator=generator).int()
    rows = torch.tensor(sorted(masked), dtype=torch.int64)
    expected = logits.clone()
    defined.apply_token_bitmask(expected, bitmask, rows)
    apply_token_bitmask(logits, bitmask, rows)
    assert torch.equal(logits, expected)


def test_rows_of_a_wider_tensor_keep_what_is_beyond_the_vocabulary():
    padded = torch.zeros(2, 48)
    apply_token_bitmask(padded[:, :40], torch.tensor([[0, 0], [0, 1]], dtype=torch.int32), torch.tensor([0, 1]))
    assert torch.isinf(padded[:, :40]).sum(-1).tolist() == [40, 39]
    assert (padded[:, 40:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_a_number_stays_so(dtype):
    logits = torch.full((1, 32), math.nan, dtype=dtype)
    logits[0, 3] = math.inf
    apply_token_bitmask(logits, torch.tensor([[1]], dtype=torch.int32), torch.tensor([0]))
    assert torch.isnan(logits).sum() == 31
    assert logits[0, 3] == -math.inf
