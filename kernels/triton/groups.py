"""Rows of a batch that have been sorted into groups, of which each has a matrix of its own."""

import triton
import triton.language as tl


@triton.jit
def rows_of_tile(offsets_ptr, num_groups, tile, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the group of a tile, its first row, and where the group's rows end: no row for tiles beyond the last.

    Rows `offsets[g]` to `offsets[g + 1]` (int32) are those of group g, cut into tiles of `BLOCK_M`. `GROUPS` is a power
    of two and at least `num_groups`.
    """
    groups = tl.arange(0, GROUPS)
    known = groups < num_groups
    starts = tl.load(offsets_ptr + groups, mask=known, other=0)
    stops = tl.load(offsets_ptr + groups + 1, mask=known, other=0)
    tiles = (stops - starts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    own = groups == group
    start = tl.sum(tl.where(own, starts + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return group, start, tl.sum(tl.where(own, stops, 0), 0)


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Return how many tiles rows have at most, however they are spread over groups."""
    filled = min(num_rows, num_groups)
    return filled + (num_rows - filled) // block_m
