"""Low-rank adapters for a batch whose rows have different ones, or none: each projection is two launches.

The adapters in memory lie in the slots of `kernels.stacked_lora`. Rows are sorted by slot on the device, once a step; a
tile of rows finds its slot there, and where no row has an adapter every program ends at once: a captured graph serves
any step. `shrink` cuts the inputs into splits of a fixed length, since a rank gives few programs,
and `expand` sums those in their order: a row's bits do not depend on the rows beside it. As in Punica (arXiv
2310.18547).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora import LoraKernels
from kernels.stacked_lora import (
    MAX_RANK,
    MAX_SLICES,
    AdapterRows,
    StackedLowRank,
    empty_low_rank,
    pin_factors,
    sort_by_slot,
)
from kernels.triton.groups import max_tiles, rows_of_tile
from kernels.triton.launch import Specialisation, launch_for

_SPLIT_LENGTH = 1024
# Ranks up to these have rows of their own in the launch table.
_RANKS = (64, MAX_RANK)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_slices"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    rows_ptr,
    offsets_ptr,
    num_rows,
    num_slots,
    num_slices,
    in_features,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write `[splits, num_rows, num_slices, RANK]` float32, for rows in their sorted order that have an adapter.

    The grid is (tiles of rows, slices, splits). The factor is the left operand: whether that is multiplied by `wgmma`
    then depends on the rank, and not on how many rows there are.
    """
    slot, start, stop = rows_of_tile(offsets_ptr, num_slots, tl.program_id(0), SLOTS, BLOCK_M)
    if start >= stop:
        return
    rows = start + tl.arange(0, BLOCK_M)
    is_row = rows < stop
    tokens = tl.load(rows_ptr + rows, mask=is_row, other=0)
    part, split = tl.program_id(1), tl.program_id(2)
    ranks, places = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_rows = x_ptr + tokens[:, None] * in_features + places[None, :]
    a_rows = a_ptr + ((slot * num_slices + part).to(tl.int64) * RANK + ranks)[:, None] * in_features + places[None, :]

    total = tl.zeros((RANK, BLOCK_M), tl.float32)
    first = split * SPLIT_LENGTH
    for k in range(first, tl.minimum(first + SPLIT_LENGTH, in_features), BLOCK_K):
        is_input = (places < in_features - k)[None, :]
        x = tl.load(x_rows + k, mask=is_row[:, None] & is_input, other=0.0)
        a = tl.load(a_rows + k, mask=is_input, other=0.0)
        total = tl.dot(a, tl.trans(x), total, input_precision="ieee")

    to = ((split * num_rows + rows).to(tl.int64) * num_slices + part) * RANK
    tl.store(out_ptr + to[:, None] + ranks[None, :], tl.trans(total), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def expand_kernel(
    shrunk_ptr,
    b_ptr,
    y_ptr,
    rows_ptr,
    offsets_ptr,
    num_rows,
    num_slots,
    size_0,
    size_1,
    size_2,
    SLOTS: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add to rows of y, `[num_tokens, size_0 + size_1 + size_2]`, what `shrink_kernel` left for each times its b.

    The grid is (tiles of the outputs of each slice, tiles of rows).
    """
    slot, start, stop = rows_of_tile(offsets_ptr, num_slots, tl.program_id(1), SLOTS, BLOCK_M)
    if start >= stop:
        return
    # Which slice a tile of outputs is of, and where it begins.
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(size_0, BLOCK_N), tl.cdiv(size_1, BLOCK_N)
    in_1, in_2 = tile >= tiles_0, tile >= tiles_0 + tiles_1
    part = in_1.to(tl.int32) + in_2.to(tl.int32)
    slice_start = tl.where(in_2, size_0 + size_1, tl.where(in_1, size_0, 0))
    slice_stop = slice_start + tl.where(in_2, size_2, tl.where(in_1, size_1, size_0))
    first_tile = tl.where(in_2, tiles_0 + tiles_1, tl.where(in_1, tiles_0, 0))
    outputs = slice_start + (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_features = size_0 + size_1 + size_2

    rows = start + tl.arange(0, BLOCK_M)
    is_row, is_output = rows < stop, outputs < slice_stop
    tokens = tl.load(rows_ptr + rows, mask=is_row, other=0)
    ranks = tl.arange(0, RANK)
    shrunk = tl.zeros((BLOCK_M, RANK), tl.float32)
    for split in range(SPLITS):
        at = ((split * num_rows + rows).to(tl.int64) * SLICES + part) * RANK
        shrunk += tl.load(shrunk_ptr + at[:, None] + ranks[None, :], mask=is_row[:, None], other=0.0)
    b_rows = (slot.to(tl.int64) * out_features + outputs) * RANK
    b = tl.load(b_ptr + b_rows[:, None] + ranks[None, :], mask=is_output[:, None], other=0.0)
    product = tl.trans(tl.dot(b, tl.trans(shrunk.to(b.dtype)), input_precision="ieee"))

    inside = is_row[:, None] & is_output[None, :]
    to = y_ptr + tokens[:, None] * out_features + outputs[None, :]
    y = tl.load(to, mask=inside, other=0.0)
    tl.store(to, (y.to(tl.float32) + product.to(y.dtype).to(tl.float32)).to(y.dtype), mask=inside)


def lora_add(x: Tensor, y: Tensor, by_slot: AdapterRows, adapters: StackedLowRank) -> None:
    """Add to each row of `y` its adapter's product of the same row of `x`, as `kernels.reference.lora_add` defines it.

    x `[num_tokens, in_features]` and y `[num_tokens, out_features]`, contiguous, are of the adapters' dtype.
    Between the two products a row is rounded to that.
    """
    num_slots, num_slices, rank, in_features = adapters.a.shape
    splits = triton.cdiv(in_features, _SPLIT_LENGTH)
    shrunk = torch.empty((splits, len(x), num_slices, rank), dtype=torch.float32, device=x.device)
    slots = triton.next_power_of_2(num_slots)
    launch = launch_for(_row_of_launches("shrink", rank, x.dtype), x.device)
    tiles = max_tiles(len(x), num_slots, launch.meta["BLOCK_M"])
    shrink_kernel[(tiles, num_slices, splits)](
        x,
        adapters.a,
        shrunk,
        *by_slot,
        len(x),
        num_slots,
        num_slices,
        in_features,
        SLOTS=slots,
        RANK=rank,
        SPLIT_LENGTH=_SPLIT_LENGTH,
        **launch.options,
    )
    launch = launch_for(_row_of_launches("expand", rank, x.dtype), x.device)
    sizes = (*adapters.sizes, 0, 0)[:MAX_SLICES]
    output_tiles = sum(triton.cdiv(size, launch.meta["BLOCK_N"]) for size in sizes)
    expand_kernel[(output_tiles, max_tiles(len(x), num_slots, launch.meta["BLOCK_M"]))](
        shrunk,
        adapters.b,
        y,
        *by_slot,
        len(x),
        num_slots,
        *sizes,
        SLOTS=slots,
        SLICES=num_slices,
        SPLITS=splits,
        RANK=rank,
        **launch.options,
    )


STACKED_LORA = LoraKernels(empty_low_rank, pin_factors, sort_by_slot, lora_add)


def _row_of_launches(kernel: str, rank: int, dtype: torch.dtype) -> str:
    """Return the row of the launch table for adapters of this rank; all of float32 share one."""
    return f"{kernel}/{'float32' if dtype == torch.float32 else next(most for most in _RANKS if rank <= most)}"


def _specialised(dtype: str, rank: int, slices: int, splits: int) -> tuple[Specialisation, Specialisation]:
    is_fast = dtype != "fp32"
    row = next(most for most in _RANKS if rank <= most) if is_fast else "float32"
    shared = {
        "rows_ptr": "*i64:16",
        "offsets_ptr": "*i32:16",
        "num_rows": "i32",
        "num_slots": "i32",
        "SLOTS": 8,
        "RANK": rank,
    }
    shrink = {
        "x_ptr": f"*{dtype}:16",
        "a_ptr": f"*{dtype}:16",
        "out_ptr": "*fp32:16",
        "num_slices": "i32",
        "in_features": "i32:16",
        "SPLIT_LENGTH": _SPLIT_LENGTH,
    }
    expand = {
        "shrunk_ptr": "*fp32:16",
        "b_ptr": f"*{dtype}:16",
        "y_ptr": f"*{dtype}:16",
        "size_0": "i32:16",
        "size_1": "i32:16",
        "size_2": "i32:16",
        "SLICES": slices,
        "SPLITS": splits,
    }
    return (
        Specialisation(shrink_kernel, f"shrink/{row}", {**shared, **shrink}, hot=is_fast, variant=f"{dtype} {rank}"),
        Specialisation(
            expand_kernel,
            f"expand/{row}",
            {**shared, **expand},
            hot=is_fast,
            variant=f"{dtype} {rank} slices={slices} splits={splits}",
        ),
    )


SPECIALISATIONS = (
    *_specialised("bf16", 16, slices=3, splits=4),
    *_specialised("bf16", 64, slices=2, splits=4),
    *_specialised("bf16", 256, slices=1, splits=14),
    *_specialised("fp16", 32, slices=1, splits=1),
    *_specialised("fp32", 256, slices=3, splits=4),
)
