"""The largest of rows, and draws, against their definitions: words bit for bit, noise within rounding, tokens equal."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference, reference_sampling
from kernels.triton import sampling
from tests.kernels.triton.poison import is_poison, poisoned

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)
# Around the edges of chunks, of which the first stage takes 8,192 tokens and draws take 4,096.
VOCAB_SIZES = st.sampled_from([1, 3, 127, 4095, 4096, 4097, 8192, 8193, 20_001])
DTYPES = st.sampled_from([torch.float32, torch.float16])


@triton.jit
def _store_noise(seed_ptr, position_ptr, words_ptr, noise_ptr, first: tl.constexpr, size: tl.constexpr):
    words = sampling.philox_words(tl.load(seed_ptr), tl.load(position_ptr), first, size)
    token = tl.arange(0, size)
    tl.store(words_ptr + token, words.to(tl.int64))
    tl.store(noise_ptr + token, sampling.gumbel_of_words(words))


@triton.jit
def _store_noise_of(words_ptr, noise_ptr, size: tl.constexpr):
    token = tl.arange(0, size)
    tl.store(noise_ptr + token, sampling.gumbel_of_words(tl.load(words_ptr + token).to(tl.uint32)))


def _logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@settings(max_examples=20, derandomize=True)
@given(SEEDS, POSITIONS, st.sampled_from([0, 4, 4096, 200_000]))
def test_words_are_those_of_the_definition_bit_for_bit_and_noise_within_rounding(seed, position, first):
    words, noise = poisoned(64, dtype=torch.int64), poisoned(64, dtype=torch.float32)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    _store_noise[(1,)](seeds, positions, words, noise, first=first, size=64)
    counters = torch.arange(first // 4, first // 4 + 16)
    low, high = (torch.tensor(word) for word in (position & 0xFFFFFFFF, position >> 32))
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF))
    expected = reference.philox_4x32_10((counters, low, high, torch.zeros_like(counters)), key)
    assert torch.equal(words, torch.stack(expected, dim=-1).flatten())
    torch.testing.assert_close(noise, reference.gumbel_of_words(words), rtol=2e-6, atol=5e-7)


def test_the_noise_of_extreme_words_is_that_of_the_definition():
    few = [0, 1, 2, 255, 256, 257, 2**24 - 1, 2**24, 2**31, 2**32 - 2**9, 2**32 - 2**8 - 1, 2**32 - 2, 2**32 - 1]
    words = torch.tensor(few + list(range(3, 2**31, 2**31 // 51)))[:64]
    noise = poisoned(64, dtype=torch.float32)
    _store_noise_of[(1,)](words, noise, size=64)
    exact = -torch.log(-torch.log1p(-((words.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)))
    torch.testing.assert_close(noise, reference.gumbel_of_words(words), rtol=2e-6, atol=5e-7)
    torch.testing.assert_close(noise[:8].double(), exact[:8], rtol=1e-6, atol=0)


@settings(max_examples=25, derandomize=True)
@given(st.integers(0, 5), VOCAB_SIZES, DTYPES, st.integers(0, 99), st.booleans())
def test_the_largest_is_the_first_of_equals(num_rows, vocab_size, dtype, seed, ties):
    logits = _logits(num_rows, vocab_size, dtype, seed)
    if ties:
        logits = logits.round().clamp(max=2)
    got, expected = sampling.largest(logits), reference.largest(logits)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[1].dtype == torch.int64


def test_the_largest_of_what_is_not_finite():
    logits = torch.zeros(5, 9000)
    logits[0] = -torch.inf
    logits[1, 8500] = torch.nan
    logits[2, 8999] = torch.inf
    logits[3, 0], logits[3, 1] = torch.nan, torch.inf
    logits[4, :8999] = -torch.inf
    values, places = sampling.largest(logits)
    assert values[0] == -torch.inf
    assert places[0] == 0
    assert not (values[1:4] < torch.inf).any()
    assert ((places >= 0) & (places < 9000)).all()
    assert (values[4], places[4]) == (0, 8999)


def test_rows_that_lie_apart_are_read_where_they_are():
    padded = _logits(3, 700, torch.float32, 0)
    padded[:, 500:] = 1e4
    logits = padded[:, :500]
    assert torch.equal(sampling.largest(logits)[1], reference.largest(logits)[1])
    seeds, positions, temperatures = torch.arange(3), torch.arange(3), torch.ones(3)
    expected = reference.gumbel_argmax(logits, temperatures, seeds, positions)
    assert torch.equal(sampling.gumbel_argmax(logits, temperatures, seeds, positions), expected)


@settings(max_examples=25, derandomize=True)
@given(
    st.lists(st.tuples(SEEDS, POSITIONS), min_size=0, max_size=5),
    VOCAB_SIZES,
    DTYPES,
    st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    st.sampled_from([0.0, 0.95, 0.999]),
)
def test_what_is_drawn_is_what_the_definition_draws(rows, vocab_size, dtype, spread, ruled_out):
    seeds, positions = torch.tensor(rows, dtype=torch.int64).view(-1, 2).T.contiguous()
    generator = torch.Generator().manual_seed(len(rows))
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * spread).clamp(-6e4, 6e4).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < ruled_out] = -torch.inf
    logits[:, vocab_size // 2] = 0
    temperatures = torch.rand(len(rows), generator=generator) + 0.1
    drawn = sampling.gumbel_argmax(logits, temperatures, seeds, positions)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == reference.gumbel_argmax(logits, temperatures, seeds, positions).tolist()


def test_a_row_draws_the_same_alone_and_among_others():
    logits, temperatures = _logits(6, 5000, torch.float32, 1), torch.linspace(0.5, 2, 6)
    seeds, positions = torch.arange(6) * 1_234_567_890_123, torch.arange(6)
    together = sampling.gumbel_argmax(logits, temperatures, seeds, positions)
    assert len(set(together.tolist())) > 3
    for row in range(6):
        one = slice(row, row + 1)
        assert sampling.gumbel_argmax(logits[one], temperatures[one], seeds[one], positions[one]) == together[row]


@pytest.mark.parametrize("temperature", [torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max])
def test_temperatures_at_the_end_of_their_range_are_no_trouble(temperature):
    logits = _logits(4, 300, torch.float32, 2)
    logits[:, :100] = -torch.inf
    seeds, positions, temperatures = torch.arange(4), torch.arange(4), torch.full((4,), temperature)
    drawn = sampling.gumbel_argmax(logits, temperatures, seeds, positions)
    assert drawn.tolist() == reference.gumbel_argmax(logits, temperatures, seeds, positions).tolist()
    assert (drawn >= 100).all()


def test_of_a_row_that_is_not_finite_some_token_is_drawn():
    logits = torch.full((3, 9000), -torch.inf)
    logits[1, 5], logits[2, 8999] = torch.nan, torch.inf
    drawn = sampling.gumbel_argmax(logits, torch.ones(3), torch.arange(3), torch.arange(3))
    assert ((drawn >= 0) & (drawn < 9000)).all()


def test_a_draw_above_a_floor_is_that_of_the_tokens_that_are_left():
    logits, temperatures = _logits(8, 4200, torch.float32, 3), torch.linspace(0.3, 3, 8)
    seeds, positions = torch.arange(8), torch.arange(8)
    floors = torch.linspace(-6, 0, 8)
    drawn = sampling.gumbel_argmax(logits, temperatures, seeds, positions, floors)
    expected = reference_sampling.gumbel_argmax_above(logits, temperatures, seeds, positions, floors)
    assert torch.equal(drawn, expected)
    assert drawn[7] == logits[7].argmax()
    assert not torch.equal(drawn, sampling.gumbel_argmax(logits, temperatures, seeds, positions))


def test_partial_results_are_written_for_every_chunk_of_every_row():
    values, places = poisoned(3, 3, dtype=torch.float32), poisoned(3, 3, dtype=torch.int32)
    logits = _logits(2, 20_000, torch.float32, 4)
    sampling.largest_kernel[(2, 3)](logits, values, places, logits.stride(0), 20_000, CHUNK=8192)
    assert is_poison(values).tolist() == [[False] * 3] * 2 + [[True] * 3]
    assert torch.equal(logits.gather(1, places[:2].long()), values[:2])
