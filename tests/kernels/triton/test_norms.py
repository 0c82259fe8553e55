"""Norms against their definition. Under the interpreter bfloat16 is cut and not rounded, so float16 stands for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.triton import norms
from tests.kernels.triton.poison import poisoned

# One unit in the last place, for a mean that was summed up in another order.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10}
SIZES = st.sampled_from([1, 7, 64, 80, 576, 1000, 2048, 2880, 5120])
DTYPES = st.sampled_from([torch.float32, torch.float16])


def _close(got: Tensor, exact: Tensor) -> None:
    assert got.dtype == exact.dtype
    rtol = TOLERANCE[exact.dtype]
    torch.testing.assert_close(got, exact, atol=rtol * 1e-2, rtol=rtol)


def _rows(num_rows: int, size: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, num_rows, size, generator=generator) * 3
    return x.to(dtype), residual.to(dtype), torch.randn(size, generator=generator).to(dtype)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_float32"])
@settings(max_examples=12, derandomize=True)
@given(st.integers(0, 5), SIZES, DTYPES, st.integers(0, 99))
def test_a_norm_is_its_definition(name, num_rows, size, dtype, seed):
    x, _, weight = _rows(num_rows, size, dtype, seed)
    _close(getattr(norms, name)(x, weight, 1e-5), getattr(reference, name)(x, weight, 1e-5))


@pytest.mark.parametrize("name", ["add_rms_norm", "add_rms_norm_float32"])
@settings(max_examples=12, derandomize=True)
@given(st.integers(0, 5), SIZES, DTYPES, st.integers(0, 99))
def test_a_norm_of_a_sum_is_its_definition_and_changes_neither_part(name, num_rows, size, dtype, seed):
    x, residual, weight = _rows(num_rows, size, dtype, seed)
    before = x.clone(), residual.clone()
    normed, total = getattr(norms, name)(x, residual, weight, 1e-6)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    expected = getattr(reference, name)(x, residual, weight, 1e-6)
    assert torch.equal(total, expected[1])
    _close(normed, expected[0])


def test_one_kind_rounds_before_the_weight_and_the_other_after():
    x, _, weight = _rows(9, 576, torch.float16, 0)
    before, after = norms.rms_norm(x, weight, 1e-6), norms.rms_norm_float32(x, weight, 1e-6)
    # One differs from the definition in single places, where a mean in another order tips a rounding.
    assert (before != reference.rms_norm(x, weight, 1e-6)).float().mean() < 0.01
    assert (after != reference.rms_norm_float32(x, weight, 1e-6)).float().mean() < 0.01
    assert (before != after).float().mean() > 0.05


def test_the_weight_of_a_float32_norm_may_be_wider_than_its_rows():
    x, _, weight = _rows(3, 100, torch.float16, 1)
    weight = 1 + weight.float() / 1000
    _close(norms.rms_norm_float32(x, weight, 1e-6), reference.rms_norm_float32(x, weight, 1e-6))


def test_rows_that_lie_apart_and_spans_of_heads_are_normed_where_they_are():
    x, _, weight = _rows(4, 96, torch.float32, 2)
    apart = x[:, 16:80]
    _close(norms.rms_norm(apart, weight[:64], 1e-5), reference.rms_norm(apart, weight[:64], 1e-5))
    heads = x.unflatten(1, (6, 16))
    _close(norms.rms_norm(heads, weight[:16], 1e-5), reference.rms_norm(heads, weight[:16], 1e-5))


def test_large_float16_values_do_not_overflow():
    x = torch.full((2, 64), 3e4, dtype=torch.float16)
    torch.testing.assert_close(norms.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones_like(x))


@pytest.mark.parametrize("in_float32", [False, True])
@settings(max_examples=8, derandomize=True)
@given(st.integers(0, 5), SIZES, DTYPES, st.integers(0, 99))
def test_a_float8_norm_has_one_scale_a_token(in_float32, num_rows, size, dtype, seed):
    x, residual, weight = _rows(num_rows, size, dtype, seed)
    expected = reference.add_rms_norm_float8(x, residual, weight, 1e-6, in_float32=in_float32)
    # The interpreter's own cast to float8 loses carries and subnormals: the kernel stops before it, torch casts.
    scaled, scales = poisoned(num_rows, size, dtype=torch.float32), poisoned(num_rows, dtype=torch.float32)
    total = poisoned(num_rows, size, dtype=dtype)
    norms._launch(x, residual, weight, scaled, total, scales, 1e-6, rounds_first=not in_float32)
    torch.testing.assert_close(scales, expected[1], rtol=2e-3, atol=0)
    assert (scaled.to(torch.float8_e4m3fn).float() != expected[0].float()).sum() <= max(1, scaled.numel() / 50)
    torch.testing.assert_close(scaled, expected[0].float(), rtol=0.07, atol=2**-9)
    assert torch.equal(total, expected[2])


def test_a_float8_norm_casts_what_it_scaled():
    x, residual, weight = _rows(3, 96, torch.float32, 4)
    values, scales, total = norms.add_rms_norm_float8(x, residual, weight, 1e-6, in_float32=True)
    expected = reference.add_rms_norm_float8(x, residual, weight, 1e-6, in_float32=True)
    assert values.dtype == torch.float8_e4m3fn
    assert (values.float() == expected[0].float()).float().mean() > 0.8
    torch.testing.assert_close(scales, expected[1])
    assert torch.equal(total, expected[2])


def test_a_float8_norm_of_zeros_is_zeros_and_what_is_not_finite_has_no_scale():
    x, residual, weight = _rows(4, 70, torch.float32, 3)
    x[0], residual[0] = 0, 0
    x[1, 5], x[2, 69] = torch.nan, torch.inf
    values, scales, _ = norms.add_rms_norm_float8(x, residual, weight, 1e-6, in_float32=True)
    assert scales.isnan().tolist() == [False, True, True, False]
    assert scales[0] == torch.finfo(torch.float32).tiny
    assert (values[0].float() == 0).all()
    assert values.float().isfinite().all()
    expected = reference.add_rms_norm_float8(x, residual, weight, 1e-6, in_float32=True)[1]
    torch.testing.assert_close(scales, expected, equal_nan=True)
