"""The mixture of experts as grouped products, against kernels.reference."""

from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.experts import StackedExperts
from kernels.triton import experts as grouped
from kernels.triton.groups import max_tiles


def _experts(num_experts: int, hidden: int, intermediate: int, *, bias: bool = False, seed: int = 0) -> StackedExperts:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).half()

    return StackedExperts(
        random(num_experts, 2 * intermediate, hidden),
        random(num_experts, 2 * intermediate) if bias else None,
        random(num_experts, hidden, intermediate),
        random(num_experts, hidden) if bias else None,
        partial(reference.clamped_swiglu, alpha=1.702, limit=7.0) if bias else reference.silu_and_mul,
    )


def _routed(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    weights, expert_ids = logits.topk(top_k)
    return expert_ids, weights.softmax(-1)


def _check(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: StackedExperts) -> None:
    got = grouped.mixture_of_experts(x, expert_ids, weights, experts)
    wanted = reference.mixture_of_experts(x, expert_ids, weights, experts)
    # Both products and the activation are rounded to float16, and each may be so to the other side.
    torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-8 * float(wanted.abs().max()))


@hypothesis.settings(max_examples=8, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    hidden=st.integers(1, 150),
    intermediate=st.integers(1, 80),
    bias=st.booleans(),
)
def test_a_mixture_is_that_of_the_definition(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int, bias: bool
) -> None:
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(1)).half()
    expert_ids, weights = _routed(num_tokens, num_experts, min(top_k, num_experts))
    _check(x, expert_ids, weights, _experts(num_experts, hidden, intermediate, bias=bias))


def test_a_token_s_experts_are_summed_in_the_order_of_their_numbers() -> None:
    """In float32 2^25 - 2^25 + 1 is one, and in the other direction it is zero."""
    ones = torch.ones(3, 8).half()
    experts = _experts(3, 8, 4, bias=True)
    constant = StackedExperts(experts.gate_up, None, torch.zeros_like(experts.down), ones, reference.silu_and_mul)
    expert_ids, weights = torch.tensor([[2, 0, 1]]), torch.tensor([[1.0, 2.0**25, -(2.0**25)]])
    assert torch.equal(grouped.mixture_of_experts(ones[:1], expert_ids, weights, constant), ones[:1])


def test_in_float32_nothing_is_rounded_to_fewer_bits() -> None:
    stacked = _experts(5, 72, 40, bias=True)
    experts = StackedExperts(
        stacked.gate_up.float(),
        stacked.gate_up_bias.float(),
        stacked.down.float(),
        stacked.down_bias.float(),
        stacked.activate_and_mul,
    )
    x = torch.randn(13, 72, generator=torch.Generator().manual_seed(1))
    expert_ids, weights = _routed(13, 5, 2)
    got = grouped.mixture_of_experts(x, expert_ids, weights, experts)
    torch.testing.assert_close(got, reference.mixture_of_experts(x, expert_ids, weights, experts), rtol=1e-5, atol=1e-6)


def test_all_tokens_may_want_one_expert_and_the_others_none() -> None:
    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(1)).half()
    _check(x, torch.full((37, 1), 2), torch.ones(37, 1), _experts(6, 24, 16))


def test_many_rows_for_each_expert_are_multiplied_in_larger_tiles() -> None:
    x = torch.randn(150, 24, generator=torch.Generator().manual_seed(1)).half()
    _check(x, *_routed(150, 2, 2), _experts(2, 24, 16))


def test_a_token_has_the_same_bits_whatever_shares_its_batch() -> None:
    experts = _experts(4, 72, 40)
    x = torch.randn(140, 72, generator=torch.Generator().manual_seed(1)).half()
    expert_ids, weights = _routed(140, 4, 3)
    together = grouped.mixture_of_experts(x, expert_ids, weights, experts)
    for rows in (slice(7, 8), slice(0, 12)):
        alone = grouped.mixture_of_experts(x[rows], expert_ids[rows], weights[rows], experts)
        assert torch.equal(alone, together[rows])


def test_no_row_but_those_of_the_groups_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs start as NaN: what a tile leaves out, or reads of another, would show."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    x = torch.randn(33, 24, generator=torch.Generator().manual_seed(1)).half()
    _check(x, *_routed(33, 5, 2), _experts(5, 24, 16))


def test_experts_that_are_not_stacked_are_called_one_by_one() -> None:
    experts = _experts(5, 24, 16)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).half()
    expert_ids, weights = _routed(9, 5, 2)
    got = grouped.mixture_of_experts(x, expert_ids, weights, list(experts))
    wanted = reference.mixture_of_experts(x, expert_ids, weights, experts[:])
    torch.testing.assert_close(got, wanted, rtol=2**-9, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "groups", "tiles"), [(1, 8, 1), (8, 8, 8), (9, 8, 8), (24, 8, 9), (23, 8, 8), (160, 1, 10), (161, 1, 11)]
)
def test_no_spread_of_rows_has_more_tiles_than_the_grid(rows: int, groups: int, tiles: int) -> None:
    assert max_tiles(rows, groups, 16) == tiles
