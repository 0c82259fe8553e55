"""Linear layers in bfloat16 in C++: the product, rounded once, for any shape, place and company."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu import extension, glue
from kernels.cpu.linear import packed_gate_up, packed_linear
from kernels.linear import Activation

pytestmark = pytest.mark.skipif(not extension.is_served(), reason="no compiler, or no processor that is served")

ROOT = Path(__file__).parents[2]
# Half of a last place of bfloat16, and what sums in float32 differ by.
ROUNDING = 2**-8 + 2**-16


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 25, 96, 97, 200])
@pytest.mark.parametrize(("out", "size"), [(1, 2), (31, 6), (32, 64), (33, 576), (80, 1536), (960, 34)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_is_the_product_rounded_once(rows: int, out: int, size: int, has_bias: bool) -> None:
    x, weight = normal(rows, size), normal(out, size)
    bias = normal(out) if has_bias else None
    # Sums of numbers of both signs may be small beside their parts.
    parts = x.double().abs() @ weight.double().abs().T
    error = (packed_linear(weight, bias)(x).double() - (exact := product(x, weight, bias))).abs()
    assert (error <= ROUNDING * exact.abs() + 1e-6 * parts).all()


def test_rows_of_an_odd_size_and_other_types_are_multiplied_too() -> None:
    for x, weight in ((normal(3, 7), normal(5, 7)), (torch.randn(3, 8), torch.randn(5, 8))):
        mine = packed_linear(weight, None)(x)
        assert mine.dtype == x.dtype
        torch.testing.assert_close(mine.double(), product(x, weight, None), atol=0.05, rtol=ROUNDING)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, linear = normal(230, 576), packed_linear(normal(96, 576), normal(96))
    together = linear(x)
    for size in (1, 2, 3, 5, 8, 11, 12, 13, 17, 96, 97, 100):
        assert torch.equal(torch.cat([linear(part) for part in x.split(size)]), together), size


def test_rows_may_lie_apart_and_begin_anywhere() -> None:
    wide, linear = normal(7, 200), packed_linear(normal(40, 64), None)
    apart = wide[:, 3:67]
    assert torch.equal(linear(apart), linear(apart.contiguous()))


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, linear = normal(5, 64), packed_linear(normal(40, 64), None)
    expected = linear(x)
    x[2, 7], x[3, 63] = float("nan"), float("inf")
    found = linear(x)
    assert not found[[2, 3]].isfinite().any()
    assert torch.equal(found[[0, 1, 4]], expected[[0, 1, 4]])


def test_no_rows_are_no_outputs() -> None:
    assert packed_linear(normal(40, 64), None)(normal(0, 64)).shape == (0, 40)
    gate_up = packed_gate_up(normal(40, 64), None, "silu")
    assert gate_up.product(normal(0, 64)).shape == (0, 40)
    assert gate_up.activated(normal(0, 64)).shape == (0, 20)


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 97])
@pytest.mark.parametrize(("size", "inputs"), [(1, 2), (15, 64), (16, 6), (17, 576), (40, 34), (96, 64)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_applied_where_it_is_stored_has_the_bits_of_one_applied_after(
    rows: int, size: int, inputs: int, activation: Activation, has_bias: bool
) -> None:
    x, weight = normal(rows, inputs), normal(2 * size, inputs)
    bias = normal(2 * size) if has_bias else None
    gate_up, product = packed_gate_up(weight, bias, activation), packed_linear(weight, bias)(x)
    assert torch.equal(gate_up.product(x), product)
    assert torch.equal(gate_up.activated(x), glue.ACTIVATIONS[activation](product))
    assert torch.equal(gate_up.activate_and_mul(product), glue.ACTIVATIONS[activation](product))


def test_gated_rows_may_lie_apart_and_have_the_same_bits_in_any_company() -> None:
    wide, gate_up = normal(230, 200), packed_gate_up(normal(66, 64), normal(66), "silu")
    x = wide[:, 3:67]
    for linear in (gate_up.product, gate_up.activated):
        together = linear(x.contiguous())
        for size in (1, 2, 11, 12, 13, 96, 97, 230):
            assert torch.equal(torch.cat([linear(part) for part in x.split(size)]), together), size


def test_what_is_not_finite_stays_in_its_gated_row() -> None:
    x, gate_up = normal(5, 64), packed_gate_up(normal(40, 64), None, "silu")
    expected = gate_up.activated(x)
    x[2, 7] = float("nan")
    found = gate_up.activated(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


def test_gates_of_other_types_and_odd_rows_are_gated_too() -> None:
    for x, weight in ((normal(3, 7), normal(10, 7)), (torch.randn(3, 8), torch.randn(10, 8))):
        gate_up = packed_gate_up(weight, None, "gelu")
        gated = glue.gelu_and_mul(packed_linear(weight, None)(x))
        assert gated.dtype == x.dtype
        assert torch.equal(gate_up.activated(x), gated)


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(RuntimeError, match="rows of 64 are wanted, not of 62"):
        packed_linear(normal(40, 64), None)(normal(2, 62))


def test_avx2_multiplies_what_avx512_multiplies() -> None:
    environment = {**os.environ, "PAGEMILL_CPU_ISA": "avx2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not avx2"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:]
