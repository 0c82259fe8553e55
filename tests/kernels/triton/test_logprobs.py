"""Log-probabilities, ranks and the likeliest tokens, against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_sampling
from kernels.triton import logprobs
from kernels.triton.launch import Launch

# Around the edges of chunks, of 2,048 and of 8,192 tokens.
VOCAB_SIZES = st.sampled_from([1, 5, 300, 2047, 2049, 8192, 8200])
DTYPES = st.sampled_from([torch.float32, torch.float16])


def _logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 5
    if seed % 2:
        logits = logits.round()
    if seed % 3 == 0:
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, -1] = 2
    return logits.to(dtype)


@settings(max_examples=25, derandomize=True)
@given(st.integers(0, 4), VOCAB_SIZES, DTYPES, st.integers(0, 99))
def test_the_log_probability_and_rank_of_a_token(num_rows, vocab_size, dtype, seed):
    logits = _logits(num_rows, vocab_size, dtype, seed)
    token_ids = torch.randint(0, vocab_size, (num_rows,), generator=torch.Generator().manual_seed(seed))
    got, expected = (module.token_logprobs(logits, token_ids, 0) for module in (logprobs, reference_sampling))
    torch.testing.assert_close(got.chosen, expected.chosen, rtol=1e-6, atol=2e-6)
    assert got.ranks.dtype == torch.int64
    assert torch.equal(got.ranks, expected.ranks)


@settings(max_examples=25, derandomize=True)
@given(st.integers(0, 4), VOCAB_SIZES, DTYPES, st.integers(0, 99), st.sampled_from([0, 1, 2, 7, 20]))
def test_the_likeliest_tokens_come_in_order_and_of_equals_the_lowest_id(num_rows, vocab_size, dtype, seed, count):
    logits = _logits(num_rows, vocab_size, dtype, seed)
    token_ids = torch.zeros(num_rows, dtype=torch.int64)
    got, expected = (module.token_logprobs(logits, token_ids, count) for module in (logprobs, reference_sampling))
    assert torch.equal(got.top_token_ids, expected.top_token_ids)
    torch.testing.assert_close(got.top_values, expected.top_values, rtol=1e-6, atol=2e-6)
    got, expected = (module.likeliest(logits.float(), count) for module in (logprobs, reference_sampling))
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.values, expected.values)


def test_more_tokens_than_a_chunk_has_may_be_asked_for(monkeypatch):
    monkeypatch.setattr(logprobs, "launch_for", lambda row, device: Launch({"CHUNK": 16}))
    scores = torch.randn(2, 50)
    got = logprobs.likeliest(scores, 60)
    assert torch.equal(got.token_ids, scores.sort(dim=-1, descending=True, stable=True).indices)


def test_zeros_of_both_signs_are_equal():
    scores = torch.tensor([[-0.0, -1.0, 0.0, -0.0]])
    assert logprobs.likeliest(scores, 4).token_ids.tolist() == [[0, 2, 3, 1]]


@pytest.mark.parametrize("num_top", [1, 20])
def test_a_row_has_the_same_bits_alone_and_among_others(num_top):
    logits = _logits(4, 9000, torch.float32, 1)
    token_ids = torch.tensor([3, 5, 8999, 0])
    together = logprobs.token_logprobs(logits, token_ids, num_top)
    for row in range(4):
        one = slice(row, row + 1)
        alone = logprobs.token_logprobs(logits[one], token_ids[one], num_top)
        assert all(torch.equal(part, whole[one]) for part, whole in zip(alone, together, strict=True))


def test_a_chunk_that_is_ruled_out_as_a_whole_adds_nothing():
    logits = torch.full((2, 20_000), -torch.inf)
    logits[0, 9000], logits[0, 9001] = 1.0, 3.0
    logits[1, 5] = -4.0
    got = logprobs.token_logprobs(logits, torch.tensor([9000, 5]), 2)
    expected = reference_sampling.token_logprobs(logits, torch.tensor([9000, 5]), 2)
    torch.testing.assert_close(got.chosen, expected.chosen, rtol=1e-6, atol=2e-6)
    assert got.ranks.tolist() == [2, 1]
    assert got.top_token_ids.tolist() == [[9001, 9000], [5, 0]]
