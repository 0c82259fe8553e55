"""Mixtures of experts: the definition against a formula, the fast path against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.ops import Expert, kernels_for

KERNELS = kernels_for(torch.device("cpu"))
HIDDEN, INTERMEDIATE = 48, 32


def expert(dtype: torch.dtype) -> Expert:
    weight, bias = torch.randn(2 * INTERMEDIATE, HIDDEN).to(dtype) / 4, torch.randn(2 * INTERMEDIATE).to(dtype)
    gate_up = KERNELS.pack_gate_up(weight, bias, "silu")
    down = KERNELS.pack_linear(torch.randn(HIDDEN, INTERMEDIATE).to(dtype) / 4, None)
    return lambda x: down(gate_up.activated(x))


def routing(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(num_tokens, num_experts)
    weights, expert_ids = logits.softmax(-1).topk(top_k)
    return expert_ids, weights


def test_the_definition_is_the_weighted_sum():
    matrices = torch.randn(5, 8, 8)
    experts = [lambda x, matrix=matrix: x @ matrix for matrix in matrices]
    x = torch.randn(7, 8)
    expert_ids, weights = routing(7, 5, 3)
    spread = torch.zeros(7, 5).scatter(1, expert_ids, weights)
    expected = torch.einsum("te,th,ehk->tk", spread, x, matrices)
    torch.testing.assert_close(reference.mixture_of_experts(x, expert_ids, weights, experts), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 12), st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_fast_path_agrees_with_the_definition(num_tokens, num_experts, data, dtype):
    top_k = data.draw(st.integers(1, num_experts))
    experts = [expert(dtype) for _ in range(num_experts)]
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    expert_ids, weights = routing(num_tokens, num_experts, top_k)
    defined = reference.mixture_of_experts(x, expert_ids, weights, experts)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    got = KERNELS.mixture_of_experts(x, expert_ids, weights, experts)
    assert got.dtype == dtype
    torch.testing.assert_close(got, defined, atol=tolerance, rtol=tolerance)


def test_an_expert_without_tokens_is_not_called():
    def never(x: Tensor) -> Tensor:
        raise AssertionError(f"called with {len(x)} tokens")

    experts = [never, lambda x: 2 * x, never, lambda x: 3 * x, never]
    x = torch.randn(4, HIDDEN)
    expert_ids = torch.tensor([[3, 1], [1, 3], [3, 1], [3, 1]])
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    got = KERNELS.mixture_of_experts(x, expert_ids, weights, experts)
    torch.testing.assert_close(got, x * torch.tensor([2.25, 2.0, 2.5, 2.0]).unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_a_token_has_the_same_bits_alone_and_among_others(dtype, size):
    experts = [expert(dtype) for _ in range(8)]
    x = torch.randn(150, HIDDEN).to(dtype)
    expert_ids, weights = routing(150, 8, 3)
    together = KERNELS.mixture_of_experts(x, expert_ids, weights, experts)
    parts = [
        KERNELS.mixture_of_experts(*part, experts)
        for part in zip(x.split(size), expert_ids.split(size), weights.split(size), strict=True)
    ]
    assert torch.equal(torch.cat(parts), together)


def test_the_clamped_swiglu_is_its_formula():
    gate, up = torch.randn(2, 40, 16) * 8
    gated = torch.minimum(gate, torch.tensor(7.0)).double()
    exact = gated * torch.sigmoid(1.702 * gated) * (up.double().clamp(-7, 7) + 1)
    got = KERNELS.clamped_swiglu(torch.cat((gate, up), -1), 1.702, 7.0)
    assert all(clamped.any() for clamped in (gate > 7, up > 7, up < -7))
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)
