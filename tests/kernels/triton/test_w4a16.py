"""Products with four-bit weights, against kernels.reference_quantized."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.interpreter import InterpreterBuilder

from kernels import reference_quantized as reference
from kernels.reference_quantized import Int4Weight
from kernels.triton import split_k, w4a16
from tests.kernels.triton import ptx
from tests.kernels.triton.poison import is_poison, poisoned


@pytest.fixture(autouse=True, scope="module")
def _inline_assembly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_inline_asm", ptx.create_inline_asm)
        yield


def _case(rows: int, outputs: int, inputs: int, group_size: int, seed: int = 0) -> tuple[Tensor, Int4Weight, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).half()
    # Off centre, so that zero points differ.
    weight = torch.randn(outputs, inputs, generator=generator) + torch.randn(outputs, 1, generator=generator)
    bias = torch.randn(outputs, generator=generator).half()
    return x, reference.quantize_int4(weight.half(), group_size), bias


def _check(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> None:
    wanted = reference.int4_linear(x, weight, bias).float()
    got = w4a16.multiply_int4(x, weight, bias)
    assert got.dtype == x.dtype
    # One rounding to float16 of each, of sums whose terms are at most so large.
    scale = x.float().abs() @ reference.dequantize_int4(weight).abs().T
    assert ((got.float() - wanted).abs() <= wanted.abs() * 2**-10 + scale * 1e-6).all()


@hypothesis.settings(max_examples=8, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 200),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([32, 64, 96, 128]),
    symmetric=st.booleans(),
    biased=st.booleans(),
)
def test_products_are_those_of_the_definition(
    rows: int, outputs: int, groups: int, group_size: int, symmetric: bool, biased: bool
) -> None:
    x, weight, bias = _case(rows, outputs, groups * group_size, group_size)
    _check(x, weight._replace(zeros=None) if symmetric else weight, bias if biased else None)


def test_split_products_are_those_of_the_definition_too() -> None:
    x, weight, bias = _case(3, 40, 1920, 32)
    assert split_k.num_splits(40, 60) == 8
    _check(x, weight, bias)


@pytest.mark.usefixtures("as_on_sm_80")
def test_the_tiles_of_other_architectures_give_the_same() -> None:
    _check(*_case(18, 130, 1024, 128))


def test_a_row_has_the_same_bits_whatever_shares_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _case(70, 40, 1024, 32)
    splits = []
    monkeypatch.setattr(w4a16, "sum_splits", lambda *args: splits.append(1) or split_k.sum_splits(*args))
    alone = w4a16.multiply_int4(x[5:6], weight, bias)
    together = w4a16.multiply_int4(x, weight, bias)
    assert len(splits) == 2
    monkeypatch.setattr(w4a16, "fills_card", lambda *_: True)
    by_one_program = w4a16.multiply_int4(x, weight, bias)
    assert len(splits) == 2
    assert torch.equal(alone[0], together[5])
    assert torch.equal(by_one_program, together)


def test_splits_are_cut_by_the_weight_alone() -> None:
    # (outputs, tiles of 128 inputs): two programs for each of 132 multiprocessors, and never less than four tiles.
    cuts = {(28672, 32): 2, (4096, 32): 8, (4096, 112): 16, (6144, 32): 8, (151936, 8): 1, (896, 7): 1}
    assert {shape: split_k.num_splits(*shape) for shape in cuts} == cuts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_whole_weight_is_rounded_once(dtype: torch.dtype, symmetric: bool) -> None:
    _, weight, _ = _case(1, 70, 192, 96)
    weight = weight._replace(zeros=None) if symmetric else weight
    if dtype == torch.bfloat16:
        # The interpreter cuts float32 off to bfloat16: with these scales there is nothing to round.
        weight = weight._replace(scales=weight.scales.log2().round().exp2())
    assert torch.equal(w4a16.dequantize_int4(weight, dtype), reference.dequantize_int4(weight).to(dtype))


def test_many_rows_are_multiplied_with_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _case(w4a16.DEQUANTIZE_ABOVE + 1, 8, 64, 32)
    monkeypatch.setattr(w4a16, "multiply_int4", lambda *_: pytest.fail("multiplied by tiles"))
    wanted = F.linear(x.float(), reference.dequantize_int4(weight).half().float(), bias.float()).half()
    torch.testing.assert_close(w4a16.int4_linear(x, weight, bias), wanted, rtol=2**-10, atol=1e-4)


def test_a_group_that_no_run_of_bytes_fills_is_refused() -> None:
    x, weight, _ = _case(1, 4, 96, 32)
    with pytest.raises(ValueError, match="A group has 48 inputs"):
        w4a16.multiply_int4(x, weight._replace(scales=weight.scales[:2]), None)


def test_sums_of_splits_fill_their_output_and_no_more() -> None:
    partials = torch.randn(4, 3, 200, generator=torch.Generator().manual_seed(0))
    storage = poisoned(5, 200, dtype=torch.float16)
    split_k.sum_splits(partials, torch.ones(200).half(), storage[1:4])
    wanted = ((partials[0] + partials[1]) + partials[2]) + partials[3] + 1
    assert torch.equal(storage[1:4], wanted.half())
    assert is_poison(storage[[0, 4]]).all()
