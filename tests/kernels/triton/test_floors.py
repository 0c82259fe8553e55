"""What top-k, top-p and min-p keep, against the definition, which sorts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference_sampling
from kernels.reference_sampling import Limits
from kernels.triton.floors import score_floors

VOCAB_SIZES = [1, 2, 63, 1000, 4096, 4099]


def _kept(logits: Tensor, temperatures: Tensor, floors: Tensor) -> Tensor:
    wide = logits.float()
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1) >= floors.unsqueeze(1)


def _check(logits: Tensor, temperatures: Tensor, *limits: Tensor) -> Tensor:
    """Compare floors, and return what is kept.

    Sums in another order may differ about the token with which the sum is p but for rounding: it may be kept or not.
    """
    arguments = logits, temperatures, Limits(*limits)
    floors, expected = score_floors(*arguments), reference_sampling.score_floors(*arguments)
    for row in (floors != expected).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        top_k, top_p, min_p = (column[one] for column in limits)
        nudged = [
            reference_sampling.score_floors(logits[one], temperatures[one], Limits(top_k, top_p + nudge, min_p))
            for nudge in (-1e-5, 1e-5)
        ]
        assert floors[row] in nudged, row
    return _kept(logits, temperatures, floors)


ROW = st.tuples(
    st.sampled_from([0, 1, 2, 3, 20, 1000, 4096, 10**6]),
    st.sampled_from([0.0, 1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 2**-24, 1.0]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.sampled_from([0.05, 0.7, 1.0, 3.0]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(max_examples=30, derandomize=True)
@given(st.lists(ROW, min_size=1, max_size=4), st.sampled_from(VOCAB_SIZES), st.integers(0, 99), st.booleans())
def test_the_floor_is_that_of_the_definition(dtype, rows, vocab_size, seed, ties):
    top_k, top_p, min_p, temperatures = (torch.tensor(column) for column in zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocab_size, generator=generator) * 4
    logits = (logits.round() if ties else logits).to(dtype)
    if seed % 3 == 0:
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -math.inf
        logits[:, vocab_size // 2] = 1
    _check(logits, temperatures, top_k, top_p, min_p)


def test_rows_without_limits_keep_all():
    logits = torch.randn(2, 100)
    floors = score_floors(logits, torch.ones(2), Limits(torch.tensor([0, 100]), torch.ones(2), torch.zeros(2)))
    assert floors.tolist() == [-math.inf, -math.inf]


def test_a_top_k_of_all_tokens_but_one_drops_the_last():
    logits = torch.tensor([[3.0, 1, 2, -5, 0]])
    kept = _check(logits, torch.ones(1), torch.tensor([4]), torch.ones(1), torch.zeros(1))
    assert kept.tolist() == [[True, True, True, False, True]]


def test_tokens_that_are_equal_to_the_last_one_are_kept():
    logits = torch.tensor([[3.0, 1, 2, 1, 1, 0]]).repeat(2, 1)
    kept = _check(logits, torch.ones(2), torch.tensor([3, 0]), torch.tensor([1.0, 0.9]), torch.zeros(2))
    assert kept.tolist() == [[True] * 5 + [False]] * 2


def test_top_p_is_taken_of_what_top_k_left():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).repeat(2, 1)
    kept = _check(logits, torch.ones(2), torch.tensor([2, 0]), torch.tensor([0.5, 0.5]), torch.zeros(2))
    # Of 4/7 and 3/7 the first is half already, of the whole it is not.
    assert kept.sum(dim=-1).tolist() == [1, 2]


def test_the_likeliest_token_is_always_kept():
    logits = torch.randn(3, 500)
    kept = _check(logits, torch.ones(3), torch.zeros(3).long(), torch.zeros(3), torch.tensor([0.0, 0.5, 1.0]))
    assert kept.sum(dim=-1).tolist() == [1, 1, 1]
    assert torch.equal(kept.int().argmax(dim=-1), logits.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [torch.finfo(torch.float32).tiny, 1e-3, 1e6, torch.finfo(torch.float32).max])
def test_temperatures_at_the_end_of_their_range(temperature):
    logits = torch.randn(2, 300)
    logits[:, ::3] = -math.inf
    temperatures = torch.full((2,), temperature)
    _check(logits, temperatures, torch.tensor([7, 0]), torch.tensor([1.0, 0.31]), torch.zeros(2))


def test_a_row_has_the_same_floor_alone_and_among_others():
    logits, temperatures = torch.randn(5, 4500), torch.linspace(0.5, 2, 5)
    limits = Limits(torch.tensor([0, 50, 0, 7, 900]), torch.linspace(0.3, 0.99, 5), torch.zeros(5))
    together = score_floors(logits, temperatures, limits)
    alone = [score_floors(logits[[row]], temperatures[[row]], Limits(*(x[[row]] for x in limits))) for row in range(5)]
    assert torch.equal(torch.cat(alone), together)


def test_rows_that_are_not_finite_end():
    logits = torch.full((3, 200), -math.inf)
    logits[1, 7], logits[2, 100] = math.nan, math.inf
    limits = Limits(torch.tensor([5] * 3), torch.tensor([0.9] * 3), torch.zeros(3))
    floors = score_floors(logits, torch.ones(3), limits)
    assert floors.shape == (3,)
