"""Gumbel noise: Philox against its published vectors, the noise against its distribution and its promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops import kernels_for
from kernels.reference import gumbel_argmax, gumbel_noise, philox_4x32_10

# The known answers for philox4x32-10 of Random123 (kat_vectors): counter, key, words.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_gives_the_published_words(counter, key, words):
    got = philox_4x32_10(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([k]) for k in key))
    assert tuple(int(word) for word in got) == words


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**40)), min_size=1, max_size=5), st.integers(1, 300))
def test_noise_depends_on_seed_position_and_id_alone(rows, vocab_size):
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = gumbel_noise(seeds, positions, vocab_size)
    assert together.shape == (len(rows), vocab_size)
    for row in range(len(rows)):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 301)
        assert torch.equal(together[row], alone[0, :vocab_size])


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(0, 2**31), st.integers(0, 63), st.integers(0, 39))
def test_every_bit_of_seed_and_position_counts(seed, position, seed_bit, position_bit):
    flipped = seed ^ (1 << seed_bit) if seed_bit < 63 else ~seed
    noise = gumbel_noise(
        torch.tensor([seed, flipped, seed]), torch.tensor([position, position, position ^ (1 << position_bit)]), 64
    )
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])


def test_noise_is_finite_and_gumbel_distributed():
    noise = gumbel_noise(torch.arange(64), torch.arange(64) * 7, 50_000)
    assert torch.isfinite(noise).all()
    for point in (-1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        exact = float(torch.exp(-torch.exp(torch.tensor(-point, dtype=torch.float64))))
        deviation = (exact * (1 - exact) / noise.numel()) ** 0.5
        assert abs((noise <= point).double().mean().item() - exact) < 5 * deviation


def test_adding_noise_to_logits_samples_their_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    rows = 40_000
    chosen = (logits + gumbel_noise(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), 5)).argmax(-1)
    shares = torch.bincount(chosen, minlength=5).double() / rows
    exact = logits.double().softmax(-1)
    assert ((shares - exact).abs() < 5 * (exact * (1 - exact) / rows).sqrt()).all()


CPU = kernels_for(torch.device("cpu")).draw


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(SEEDS, st.integers(0, 2**40)), min_size=1, max_size=5),
    st.integers(1, 700),
    st.sampled_from([0.0, 1e-3, 1.0, 10.0, 1e4]),
    st.sampled_from([0.0, 0.5, 0.95, 0.999]),
)
def test_the_cpu_draws_what_the_definition_draws(rows, vocab_size, spread, ruled_out):
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(int(seeds[0]) & 0xFFFF)
    scores = torch.randn(len(rows), vocab_size, generator=generator) * spread
    scores[torch.rand(scores.shape, generator=generator) < ruled_out] = -torch.inf
    scores[:, vocab_size // 2] = 0.0  # something is left
    temperatures = torch.rand(len(rows), generator=generator) + 0.1
    for logits in (scores, scores.bfloat16()):
        drawn = CPU(logits, temperatures, seeds, positions)
        assert drawn.dtype == torch.int64
        assert drawn.tolist() == gumbel_argmax(logits, temperatures, seeds, positions).tolist()


def test_over_a_large_vocabulary_the_cpu_draws_what_the_definition_draws():
    scores = torch.randn(64, 50_257, generator=torch.Generator().manual_seed(1)) * 2
    scores[::3, 100:] = -torch.inf
    seeds, positions = torch.arange(64) * 12_345_678_901, torch.arange(64)
    temperatures = torch.linspace(0.5, 1.5, 64)
    drawn = CPU(scores, temperatures, seeds, positions)
    assert torch.equal(drawn, gumbel_argmax(scores, temperatures, seeds, positions))
    assert len(set(drawn.tolist())) > 40


def test_what_is_drawn_follows_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    rows = 20_000
    chosen = CPU(logits.repeat(rows, 1), torch.ones(rows), torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
    shares = torch.bincount(chosen, minlength=5).double() / rows
    exact = logits.double().softmax(-1)
    assert ((shares - exact).abs() < 5 * (exact * (1 - exact) / rows).sqrt()).all()
