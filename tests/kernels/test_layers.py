"""Norms, rotary embedding, activation and linears, against their formulas in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels.linear import REFERENCE_ACTIVATIONS
from kernels.ops import kernels_for

KERNELS = kernels_for(torch.device("cpu"))
ROWS = st.integers(1, 70)


@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([8, 48, 576]))
def test_rms_norm_is_its_formula(rows, size):
    x, weight = torch.randn(rows, size), torch.randn(size)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5).double(), exact, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_large_float16_values_does_not_overflow():
    x = torch.full((2, 64), 3e4, dtype=torch.float16)
    normed = KERNELS.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(normed, torch.ones_like(x))


def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum():
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    normed, total = KERNELS.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, KERNELS.rms_norm(x + residual, weight, 1e-6))


def test_rms_norm_float32_rounds_once_after_the_weight():
    x, weight = torch.randn(9, 576).bfloat16(), torch.randn(576)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed = KERNELS.rms_norm_float32(x, weight, 1e-6)
    assert normed.dtype == torch.bfloat16
    # Half a unit of bfloat16's last place: a second rounding would pass it.
    assert ((normed.double() - exact).abs() <= exact.abs() * 2.0**-8).all()
    assert not torch.equal(normed, KERNELS.rms_norm(x, weight.bfloat16(), 1e-6))


def test_add_rms_norm_float32_returns_the_norm_of_the_sum_and_the_sum():
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    normed, total = KERNELS.add_rms_norm_float32(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, KERNELS.rms_norm_float32(x + residual, weight, 1e-6))


@settings(deadline=None, max_examples=30)
@given(ROWS, st.sampled_from([(9, 3), (7, 1)]), st.sampled_from([16, 64, 80, 128]))
def test_rotation_turns_each_pair_of_halves_by_its_angle(rows, heads, head_dim):
    query, key = torch.randn(rows, heads[0], head_dim), torch.randn(rows, heads[1], head_dim)
    angles = torch.rand(rows, head_dim // 2) * 100
    turned = KERNELS.rotary_embedding(query, key, angles.cos(), angles.sin())
    turn = torch.polar(torch.ones(rows, 1, head_dim // 2, dtype=torch.float64), angles.double().unsqueeze(1))
    for x, got in zip((query, key), turned, strict=True):
        exact = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        torch.testing.assert_close(got.double(), torch.cat((exact.real, exact.imag), -1), atol=1e-5, rtol=1e-5)


def test_a_rotation_of_some_dimensions_leaves_the_others():
    query, key = torch.randn(5, 9, 80), torch.randn(5, 3, 80)
    angles = torch.rand(5, 16) * 100
    turned = KERNELS.rotary_embedding(query, key, angles.cos(), angles.sin())
    expected = KERNELS.rotary_embedding(query[..., :32], key[..., :32], angles.cos(), angles.sin())
    for x, got, first in zip((query, key), turned, expected, strict=True):
        assert torch.equal(got, torch.cat((first, x[..., 32:]), -1))


GATES = [
    (KERNELS.silu_and_mul, F.silu),
    (KERNELS.gelu_and_mul, lambda gate: gate * (1 + torch.erf(gate / 2**0.5)) / 2),
    (
        KERNELS.gelu_tanh_and_mul,
        lambda gate: gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2,
    ),
]


@pytest.mark.parametrize(("activate_and_mul", "formula"), GATES, ids=["silu", "gelu", "gelu_tanh"])
def test_a_gate_weighs_the_second_half_by_the_first(activate_and_mul, formula):
    gate, up = torch.randn(2, 5, 48) * 3
    exact = formula(gate.double()) * up.double()
    got = activate_and_mul(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_packed_gate_up_is_the_gated_product(dtype, activation):
    weight, bias = torch.randn(96, 80).to(dtype), torch.randn(96).to(dtype)
    x = torch.randn(17, 80).to(dtype)
    gate_up, product = KERNELS.pack_gate_up(weight, bias, activation), KERNELS.pack_linear(weight, bias)(x)
    assert torch.equal(gate_up.product(x), product)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    exact = REFERENCE_ACTIVATIONS[activation](product.double())
    torch.testing.assert_close(gate_up.activated(x).double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_is_the_product(dtype, bias):
    weight, offset = torch.randn(96, 80).to(dtype), torch.randn(96).to(dtype)
    x = torch.randn(17, 80).to(dtype)
    linear = KERNELS.pack_linear(weight, offset if bias else None)
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(linear(x).double(), exact, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536)])
def test_a_row_of_a_packed_linear_has_the_same_bits_in_every_batch(dtype, shape):
    weight = torch.randn(shape).to(dtype)
    rows = torch.randn(512, shape[1]).to(dtype)
    linear = KERNELS.pack_linear(weight, None)
    together = linear(rows)
    for size in (1, 2, 3, 5, 8, 17, 33, 64, 96, 200):
        parts = torch.cat([linear(part) for part in rows.split(size)])
        assert torch.equal(parts, together), size
