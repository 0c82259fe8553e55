"""Low-rank adapters: packed, for many at once, against the definition for one."""

import pytest
import torch

from kernels import reference
from kernels.lora import LoraShape, LowRank
from kernels.ops import kernels_for

CPU = torch.device("cpu")
KERNELS = kernels_for(CPU).lora
IN, OUT = 48, 80
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}
# Outputs of two factor pairs that leave some columns alone, and of one pair for all.
SPLIT, WHOLE = ((0, 16, 4), (32, 80, 7)), ((0, OUT, 64),)


def pairs(layout, dtype):
    return [
        LowRank(torch.randn(rank, IN).to(dtype), torch.randn(stop - start, rank).to(dtype) / 4, start, stop)
        for start, stop, rank in layout
    ]


def add(x, y, slots, adapters):
    """Add to y, in place, each row's adapter: that of its slot."""
    held = KERNELS.allocate(4, 64, LoraShape(IN, (OUT,)), x.dtype, CPU)
    for slot, factors in adapters.items():
        held.put(slot, KERNELS.stage(factors, CPU))
    KERNELS.add(x, y, KERNELS.sort_rows(torch.tensor(slots), 4), held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_adapter_and_the_other_rows_nothing(dtype):
    torch.manual_seed(0)
    first, second = pairs(SPLIT, dtype), pairs(WHOLE, dtype)
    x, y = torch.randn(10, IN).to(dtype), torch.randn(10, OUT).to(dtype)
    slots = [-1, 2, 0, -1, 0, 0, -1, 0, 2, -1]
    rows = torch.tensor([1, 8, 2, 4, 5, 7])
    expected = y.clone()
    for own, adapter in ((rows[:2], first), (rows[2:], second)):
        for a, b, start, stop in adapter:
            reference.lora_add(x, expected, own, a, b, slice(start, stop))
    before = y.clone()
    add(x, y, slots, {2: first, 0: second})
    torch.testing.assert_close(y, expected, atol=TOLERANCE[dtype], rtol=0.02)
    untouched = torch.tensor([0, 3, 6, 9])
    assert torch.equal(y[untouched], before[untouched])
    assert torch.equal(y[rows[:2], 16:32], before[rows[:2], 16:32])
    assert not torch.allclose(y[rows], before[rows], atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_alone_among_others_and_as_part_of_all(dtype):
    torch.manual_seed(1)
    mine, other = pairs(SPLIT, dtype), pairs(WHOLE, dtype)
    x, y = torch.randn(40, IN).to(dtype), torch.randn(40, OUT).to(dtype)
    together = y.clone()
    add(x, together, [3] * 40, {3: mine})
    mixed = y.clone()
    slots = torch.tensor([3] * 9 + [1] * 20 + [-1] * 11)[torch.randperm(40)]
    add(x, mixed, slots.tolist(), {3: mine, 1: other})
    assert torch.equal(mixed[slots == 3], together[slots == 3])
    assert torch.equal(mixed[slots == -1], y[slots == -1])
    for row in range(40):
        alone = y[row : row + 1].clone()
        add(x[row : row + 1], alone, [0], {0: mine})
        assert torch.equal(alone[0], together[row])


def test_a_slot_holds_what_was_put_there_last():
    x, y = torch.randn(3, IN), torch.randn(3, OUT)
    before, factors = y.clone(), pairs(WHOLE, torch.float32)
    held = KERNELS.allocate(2, 64, LoraShape(IN, (OUT,)), x.dtype, CPU)
    rows = KERNELS.sort_rows(torch.tensor([1, 1, -1]), 2)
    held.put(1, KERNELS.stage(factors, CPU))
    held.put(1, None)
    KERNELS.add(x, y, rows, held)
    assert torch.equal(y, before)
    held.put(1, KERNELS.stage(factors, CPU))
    KERNELS.add(x, y, rows, held)
    assert (y != before).any(dim=1).tolist() == [True, True, False]
