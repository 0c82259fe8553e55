"""Adapters of a mixed batch, against kernels.reference.lora_add."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.lora import LoraShape, LowRank
from kernels.stacked_lora import StackedLowRank, empty_low_rank, sort_by_slot
from kernels.triton import lora
from tests.kernels.triton.poison import is_poison, poisoned


def _slots(num_slots: int, max_rank: int, in_features: int, sizes: tuple[int, ...]) -> StackedLowRank:
    return empty_low_rank(num_slots, max_rank, LoraShape(in_features, sizes), torch.float16, torch.device("cpu"))


def _pairs(slot: int, rank: int, in_features: int, sizes: tuple[int, ...], left_out: int | None) -> list[LowRank]:
    generator = torch.Generator().manual_seed(slot)
    pairs, start = [], 0
    for index, size in enumerate(sizes):
        a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
        b = torch.randn(size, rank, generator=generator) / rank**0.5
        if index != left_out:
            pairs.append(LowRank(a.half(), b.half(), start, start + size))
        start += size
    return pairs


def _check(slots: Tensor, adapters: dict[int, list[LowRank]], in_features: int, sizes: tuple[int, ...]) -> None:
    num_slots, max_rank = 5, max(len(pair.a) for pairs in adapters.values() for pair in pairs)
    stacked = _slots(num_slots, max_rank, in_features, sizes)
    for slot, pairs in adapters.items():
        stacked.put(slot, pairs)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(len(slots), in_features, generator=generator).half()
    # Rows without an adapter must not be written at all.
    y = poisoned(len(slots), sum(sizes), dtype=torch.float16)
    y[slots >= 0] = torch.randn(int((slots >= 0).sum()), sum(sizes), generator=generator).half()
    wanted = y.clone()
    for slot, pairs in adapters.items():
        for pair in pairs:
            rows = (slots == slot).nonzero().flatten()
            reference.lora_add(x, wanted, rows, pair.a, pair.b, slice(pair.start, pair.stop))
    before = y.clone()
    lora.lora_add(x, y, sort_by_slot(slots, num_slots), stacked)
    assert is_poison(y[slots < 0]).all()
    torch.testing.assert_close(y, wanted, rtol=2**-9, atol=4e-3, equal_nan=True)
    assert (slots < 0).all() or not torch.allclose(y, before, atol=0.1, equal_nan=True)


@hypothesis.settings(max_examples=8, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    slots=st.lists(st.sampled_from([-1, 0, 1, 3]), min_size=1, max_size=40),
    ranks=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 8)),
    in_features=st.integers(1, 300),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    left_out=st.sampled_from([None, 1]),
)
def test_each_row_gets_what_its_adapter_adds(
    slots: list[int], ranks: tuple[int, ...], in_features: int, sizes: list[int], left_out: int | None
) -> None:
    shape = in_features, tuple(sizes)
    adapters = {slot: _pairs(slot, rank, *shape, left_out) for slot, rank in zip((0, 1, 3), ranks, strict=True)}
    _check(torch.tensor(slots), adapters, *shape)


def test_inputs_longer_than_a_split_are_summed_whole() -> None:
    shape = 2 * 1024 + 40, (70, 24, 24)
    _check(torch.tensor([1, -1, 1, 0]), {slot: _pairs(slot, 8, *shape, None) for slot in (0, 1)}, *shape)


def test_a_step_without_adapters_is_left_alone() -> None:
    shape = 64, (32,)
    _check(torch.full((20,), -1), {0: _pairs(0, 8, *shape, None)}, *shape)


def test_a_row_has_the_same_bits_whatever_shares_its_batch() -> None:
    shape = 1100, (70, 24, 24)
    stacked = _slots(3, 16, *shape)
    for slot in range(3):
        stacked.put(slot, _pairs(slot, 16, *shape, None))
    slots = torch.arange(40) % 4 - 1
    x = torch.randn(40, 1100, generator=torch.Generator().manual_seed(9)).half()
    together = torch.zeros(40, 118).half()
    lora.lora_add(x, together, sort_by_slot(slots, 3), stacked)
    for rows in (slice(3, 4), slice(20, 31)):
        alone = torch.zeros(len(x[rows]), 118).half()
        lora.lora_add(x[rows], alone, sort_by_slot(slots[rows], 3), stacked)
        assert torch.equal(alone, together[rows])
        assert alone.any()


def test_an_adapter_leaves_nothing_of_its_predecessor_in_a_slot() -> None:
    stacked = _slots(2, 8, 64, (32, 16))
    stacked.put(1, _pairs(0, 8, 64, (32, 16), None))
    last = _pairs(1, 4, 64, (32, 16), 1)
    stacked.put(1, last)
    fresh = _slots(2, 8, 64, (32, 16))
    fresh.put(1, last)
    assert torch.equal(stacked.a, fresh.a)
    assert torch.equal(stacked.b, fresh.b)


def test_factors_that_have_no_place_are_refused() -> None:
    stacked = _slots(2, 16, 64, (32, 16))
    for pair in (LowRank(torch.ones(8, 64), torch.ones(16, 8), 0, 16), *_pairs(0, 17, 64, (32, 16), 1)):
        with pytest.raises(ValueError, match=r"has no place among slices of \(32, 16\) outputs and rank 16"):
            stacked.put(0, [pair])
    for rank, sizes in ((257, (8,)), (8, (8, 8, 8, 8))):
        with pytest.raises(ValueError, match="up to 3 slices and rank 256"):
            _slots(2, rank, 64, sizes)
