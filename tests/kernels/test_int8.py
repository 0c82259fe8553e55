"""Linears in 8-bit integers: whoever serves them has the bits of the definition, which is near the product."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import int8, reference
from kernels.cpu import extension
from kernels.cpu import int8 as compiled
from kernels.linear import REFERENCE_ACTIVATIONS, Activation, Linear, PackGateUp, gate_up_packer

Pack = Callable[[Tensor, Tensor | None], Linear]

ROOT = Path(__file__).parents[2]
LEAST = torch.finfo(torch.float32).tiny
SHAPES = [(1, 576, 960), (13, 100, 77), (97, 33, 1), (200, 64, 33), (5, 1, 5), (25, 1536, 48), (2, 3, 300)]
"""Rows, inputs and outputs: whole tiles, parts of them, one row, and sizes that fit no vector."""

PACKERS = [pytest.param(int8.int8_linear, id="torch")]
GATE_UP_PACKERS = [pytest.param(gate_up_packer(int8.int8_linear), id="torch")]
if extension.is_served():
    PACKERS.append(pytest.param(compiled.int8_linear, id="compiled"))
    GATE_UP_PACKERS.append(pytest.param(compiled.int8_gate_up, id="compiled"))
every_packer = pytest.mark.parametrize("pack", PACKERS)
every_gate_up_packer = pytest.mark.parametrize("pack", GATE_UP_PACKERS)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def defined(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    values, scales = reference.quantize_weight(weight)
    return reference.int8_linear(x, values, scales, None if bias is None else bias.float())


@every_packer
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_has_the_bits_of_the_definition(
    pack: Pack, rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    x, weight = normal(rows, inputs), normal(outputs, inputs)
    bias = normal(outputs) if has_bias else None
    assert torch.equal(pack(weight, bias)(x), defined(x, weight, bias))


@every_gate_up_packer
@pytest.mark.parametrize(("rows", "inputs", "size"), [(1, 576, 96), (13, 100, 17), (97, 33, 1), (25, 1536, 40)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_linear_has_the_bits_of_the_product_gated_after(
    pack: PackGateUp, rows: int, inputs: int, size: int, activation: Activation, has_bias: bool
) -> None:
    x, weight = normal(rows, inputs + 3)[:, 3:], normal(2 * size, inputs)
    bias = normal(2 * size) if has_bias else None
    gate_up, product = pack(weight, bias, activation), defined(x.contiguous(), weight, bias)
    assert torch.equal(gate_up.product(x), product)
    assert torch.equal(gate_up.activated(x), gate_up.activate_and_mul(product))
    exact = REFERENCE_ACTIVATIONS[activation](product.double())
    # Rounded after the activation and after the product.
    torch.testing.assert_close(gate_up.activated(x).double(), exact, atol=2e-5, rtol=2**-6)


@every_gate_up_packer
def test_a_gated_row_has_the_same_bits_in_any_company(pack: PackGateUp) -> None:
    x, linear = normal(150, 200), pack(normal(66, 200), normal(66), "silu").activated
    together = linear(x)
    for size in (1, 2, 12, 13, 97):
        assert torch.equal(torch.cat([linear(part) for part in x.split(size)]), together), size


@every_gate_up_packer
def test_gates_of_other_types_keep_their_type(pack: PackGateUp) -> None:
    x, weight = torch.randn(5, 64), torch.randn(34, 64)
    gated = pack(weight, None, "silu").activated(x)
    assert gated.dtype == torch.float32
    assert torch.equal(gated, reference.silu_and_mul(defined(x, weight)))


def test_the_definition_is_within_the_rounding_of_both_factors() -> None:
    x, weight = normal(40, 576), normal(70, 576)
    exact = x.double() @ weight.double().T
    # Each factor is off by up to half a step, which is its row's maximum over 127.
    steps_x, steps_weight = (y.double().abs().amax(1) / 254 * 1.001 for y in (x, weight))
    sums_x, sums_weight = (y.double().abs().sum(1) for y in (x, weight))
    bound = steps_x[:, None] * sums_weight + sums_x[:, None] * steps_weight + 576 * steps_x[:, None] * steps_weight
    error = (defined(x, weight).double() - exact).abs()
    assert (error <= bound + exact.abs() * 2**-8).all()
    assert error.pow(2).mean().sqrt() < 0.02 * exact.pow(2).mean().sqrt()


@every_packer
def test_the_largest_products_do_not_overflow(pack: Pack) -> None:
    x = torch.ones(9, 2048).bfloat16()
    weight = torch.ones(34, 2048).bfloat16()
    weight[::2] *= -1
    assert torch.equal(pack(weight, None)(x), (x.double() @ weight.double().T).bfloat16())


@every_packer
def test_a_row_has_the_same_bits_in_any_company(pack: Pack) -> None:
    linear = pack(normal(96, 200), normal(96))
    x = normal(150, 200) * torch.logspace(-3, 3, 150).unsqueeze(1).bfloat16()
    together = linear(x)
    for part in (x[:1], x[7:8], x[5:18], x[100:]):
        first = next(i for i in range(150) if torch.equal(x[i], part[0]))
        assert torch.equal(linear(part), together[first : first + len(part)])


@every_packer
def test_a_row_of_zeros_is_the_bias(pack: Pack) -> None:
    bias = normal(20)
    x = normal(3, 64)
    x[1] = 0
    assert torch.equal(pack(normal(20, 64), bias)(x)[1], bias)


@every_packer
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 63, 65])
def test_a_row_that_is_not_finite_stays_so_and_the_others_are_spared(pack: Pack, value: float, place: int) -> None:
    x, weight = normal(14, 66), normal(40, 66)
    linear = pack(weight, None)
    clean = linear(x)
    x[6, place] = value
    out = linear(x)
    assert out[6].isnan().all()
    assert torch.equal(out[torch.arange(14) != 6], clean[torch.arange(14) != 6])


@every_packer
def test_denormal_rows_are_off_by_no_more_than_the_least_normal_number(pack: Pack) -> None:
    x = (torch.randn(4, 64).double() * 1e-38).bfloat16()
    weight = normal(8, 64)
    out = pack(weight, None)(x)
    assert ((out.double() - x.double() @ weight.double().T).abs() <= LEAST * weight.double().abs().sum(1)).all()
    assert out.count_nonzero() > 0


@every_packer
def test_weights_of_zero_give_zero(pack: Pack) -> None:
    assert torch.equal(pack(torch.zeros(3, 64).bfloat16(), None)(normal(2, 64)), torch.zeros(2, 3).bfloat16())


@every_packer
def test_rows_may_lie_apart_and_begin_anywhere(pack: Pack) -> None:
    wide, weight = normal(9, 301), normal(33, 100)
    x = wide[:, 1:101]
    assert torch.equal(pack(weight, None)(x), defined(x.contiguous(), weight))


@every_packer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_keep_their_type(pack: Pack, dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(33, 64).to(dtype)
    out = pack(weight, None)(x)
    assert out.dtype == dtype
    assert torch.equal(out, defined(x, weight))


def test_where_torchs_product_saturates_the_definition_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).clamp(-32768, 32767).int())
    int8._multiplies_exactly.cache_clear()
    try:
        x, weight = torch.ones(9, 64).bfloat16(), torch.ones(8, 64).bfloat16()
        assert torch.equal(int8.int8_linear(weight, None)(x), torch.full((9, 8), 64).bfloat16())
    finally:
        int8._multiplies_exactly.cache_clear()


@pytest.mark.skipif(not extension.is_served(), reason="no compiler, or no processor that is served")
def test_avx2_has_the_same_bits() -> None:
    code = "import sys, pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    args = ["tests/kernels/test_int8.py", "-k", "compiled"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PAGEMILL_CPU_ISA": "avx2"}
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, cwd=ROOT, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stdout.decode()[-3000:]
