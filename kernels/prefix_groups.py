"""Which rows of a step begin in the same blocks, so that attention can read those once for all of them."""

from typing import NamedTuple

import numpy as np


class PrefixGroup(NamedTuple):
    """Rows, as indices into the tables, whose first `num_blocks` blocks are the same."""

    rows: np.ndarray
    num_blocks: int


def prefix_groups(tables: np.ndarray, most: int) -> list[PrefixGroup]:
    """Return groups of 2 to `most` rows that share their first block at least; a row is in one group or in none.

    tables `[num_rows, max_blocks]` int32, padded with the null block. Where more than `most` rows share a prefix,
    those that share most of it are grouped together.
    """
    if most < 2 or len(tables) < 2:
        return []
    first_blocks = tables[:, 0]
    candidates = np.flatnonzero(np.bincount(first_blocks)[first_blocks] > 1)
    # In order of their tables' bytes, those that share most are neighbours.
    keys = [table.tobytes() for table in tables[candidates]]
    candidates = candidates[sorted(range(len(keys)), key=keys.__getitem__)]
    starts = np.flatnonzero(np.diff(first_blocks[candidates], prepend=-1))
    groups = []
    for of_one_prefix in np.split(candidates, starts[1:]):
        for start in range(0, len(of_one_prefix) - 1, most):
            rows = of_one_prefix[start : start + most]
            groups.append(PrefixGroup(rows, _leading_blocks(tables[rows])))
    return groups


def _leading_blocks(tables: np.ndarray) -> int:
    same = (tables == tables[0]).all(axis=0)
    return len(same) if same.all() else int(same.argmin())
