"""Products in float8, against kernels.reference_quantized."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference_quantized as reference
from kernels.reference_quantized import Float8Weight
from kernels.triton import fp8, split_k


def _case(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Float8Weight, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Each block of the weight is of its own size.
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= (torch.arange(outputs) // 128 + 1).unsqueeze(1) * (torch.arange(inputs) // 128 + 1)
    bias = torch.randn(outputs, generator=generator)
    return _activations(rows, inputs), reference.quantize_float8_weight(weight / inputs), bias.half()


def _activations(rows: int, size: int) -> Tensor:
    """Return float16 numbers of which float8 holds all exactly: the interpreter rounds to float8 by rules of its own.

    Each group has a power of two as its scale, and its first number is 448 of them.
    """
    generator = torch.Generator().manual_seed(1)
    levels = torch.randn(rows, size, generator=generator).mul(100).clamp(-448, 448)
    levels = levels.where(levels.abs() > 2**-4, 0).to(torch.float8_e4m3fn).float()
    levels[:, ::128] = 448
    groups = torch.arange(size) // 128
    return (levels * 2.0 ** ((torch.arange(rows).unsqueeze(1) + groups) % 5 - 8)).half()


def _check(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> None:
    wanted = reference.float8_linear(x, weight, bias)
    got = fp8.float8_linear(x, weight, bias)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got, wanted, rtol=2**-9, atol=1e-4 * float(wanted.abs().max()))


@hypothesis.settings(max_examples=6, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    rows=st.integers(1, 150), outputs=st.integers(1, 300), inputs=st.integers(1, 400), biased=st.booleans()
)
def test_products_are_those_of_the_definition(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    x, weight, bias = _case(rows, outputs, inputs)
    _check(x, weight, bias if biased else None)


def test_split_products_are_those_of_the_definition_too() -> None:
    assert split_k.num_splits(20, 9) == 2
    _check(*_case(3, 20, 9 * 128))


def test_a_row_has_the_same_bits_whatever_shares_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _case(130, 20, 9 * 128)
    together = fp8.float8_linear(x, weight, bias)
    assert torch.equal(fp8.float8_linear(x[5:6], weight, bias)[0], together[5])
    assert torch.equal(fp8.float8_linear(x[:20], weight, bias), together[:20])
    monkeypatch.setattr(fp8, "sum_splits", lambda *_: pytest.fail("split"))
    monkeypatch.setattr(fp8, "fills_card", lambda *_: True)
    assert torch.equal(fp8.float8_linear(x, weight, bias), together)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (9, 128), (17, 300)])
def test_activations_are_quantised_bit_for_bit_as_the_definition_says(rows: int, size: int) -> None:
    x = _activations(rows, size)
    x[rows // 2, :128] = 0
    values, scales = fp8.quantize_float8_groups(x)
    wanted_values, wanted_scales = reference.quantize_float8_groups(x)
    assert torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


@pytest.mark.usefixtures("as_on_sm_80")
def test_cards_without_float8_are_refused() -> None:
    with pytest.raises(LookupError, match="does not run on sm_80: it needs sm_89"):
        fp8.float8_linear(*_case(1, 1, 1))
