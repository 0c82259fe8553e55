"""Low-rank adapters: packed, for many at once, against the definition for one."""

import pytest
import torch

from kernels import reference
from kernels.lora import LowRank, Segment, lora_add, pack_low_rank
from kernels.ops import kernels_for

PACK = kernels_for(torch.device("cpu")).pack_linear
IN, OUT = 48, 80
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}
# Outputs of two factor pairs that leave some columns alone, and of one pair for all.
SPLIT, WHOLE = ((0, 16, 4), (32, 80, 7)), ((0, OUT, 64),)


def pairs(layout, dtype):
    return [
        LowRank(torch.randn(rank, IN).to(dtype), torch.randn(stop - start, rank).to(dtype) / 4, start, stop)
        for start, stop, rank in layout
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_its_own_adapter_and_the_other_rows_nothing(dtype):
    torch.manual_seed(0)
    first, second = pairs(SPLIT, dtype), pairs(WHOLE, dtype)
    x, y = torch.randn(10, IN).to(dtype), torch.randn(10, OUT).to(dtype)
    rows = torch.tensor([8, 1, 4, 2, 7, 5])
    expected = y.clone()
    for own, adapter in ((rows[:2], first), (rows[2:], second)):
        for a, b, start, stop in adapter:
            reference.lora_add(x, expected, own, a, b, slice(start, stop))
    before = y.clone()
    lora_add(x, y, rows, [Segment(0, 2, pack_low_rank(first, PACK)), Segment(2, 6, pack_low_rank(second, PACK))])
    torch.testing.assert_close(y, expected, atol=TOLERANCE[dtype], rtol=0.02)
    untouched = torch.tensor([0, 3, 6, 9])
    assert torch.equal(y[untouched], before[untouched])
    assert torch.equal(y[rows[:2], 16:32], before[rows[:2], 16:32])
    assert not torch.allclose(y[rows], before[rows], atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_bit_alone_among_others_and_as_part_of_all(dtype):
    torch.manual_seed(1)
    mine, other = pack_low_rank(pairs(SPLIT, dtype), PACK), pack_low_rank(pairs(WHOLE, dtype), PACK)
    x, y = torch.randn(40, IN).to(dtype), torch.randn(40, OUT).to(dtype)
    together = y.clone()
    lora_add(x, together, None, [Segment(0, 40, mine)])
    mixed = y.clone()
    rows = torch.randperm(40)
    lora_add(x, mixed, rows, [Segment(0, 9, mine), Segment(9, 40, other)])
    assert torch.equal(mixed[rows[:9]], together[rows[:9]])
    for row in range(40):
        alone = y[row : row + 1].clone()
        lora_add(x[row : row + 1], alone, None, [Segment(0, 1, mine)])
        assert torch.equal(alone[0], together[row])
