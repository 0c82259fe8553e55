"""How a step's attention is cut into the work of programs: from host integers alone, once for all layers of one window.

A sequence with several query tokens is cut into **tiles** of them, which `attention.py` works on. A row alone, a decode
row as a rule, belongs to `decode.py`, which cuts its *keys* into **segments** of `SEGMENT`, at multiples of it:

    keys of one row    | segment 0 | segment 1 | segment 2 | se.    position
    what it is         ((((none + s0) + s1) + s2) + s3)             merged in this order, always
    one program        |<---------------- item ---------------->|   writes the row's output
    few rows, split    |<- item  ->|<- item  ->|<- item  ->|<--->|  each writes a part; a second kernel merges them
    shared prefix      |<------- group ------->|<- item  ->|<--->|  one program for the shared segments of many rows

The cut depends on what else is in the batch, the result does not: a segment's bits are the same in any program, and a
program merges its segments as the second kernel would. That holds for what is cut here only because a program has
either all segments of a row, or its first ones, or a single one.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cache import AttentionBatch, KVCache
from kernels.prefix_groups import prefix_groups

SEGMENT = 256
"""Keys of a segment: what a shared prefix is rounded down to, and what one program of a split row reads."""

GROUP_ROWS = 32
"""Rows of a tile of a prefix group, all heads of a KV head among them. With 64 the compiler takes other instructions,
and other orders of summing, than for the 16 rows of a tile of one sequence."""

# As many decode programs as are resident at once. They keep 64 KiB under way, three times what the latency of an H100's
# memory asks for, so that a few of them are enough when the last ones end.
_PROGRAMS_OF_A_MULTIPROCESSOR = 2

ITEM_WIDTH = 6


class DecodePlan(NamedTuple):
    """Rows that are alone, for `kernels.triton.decode`; all integers are int32.

    `counts` says on the device how many of the items, groups and rows there are: where a CUDA graph reads the plan, the
    other tensors are as long as they may become.

    An item is (sequence, first member, members, position of the last key, first segment, end segment).
    """

    items: Tensor  # [num_items, ITEM_WIDTH], each of one row, the longest first
    groups: Tensor  # [num_groups, ITEM_WIDTH], each of several rows that share these segments
    members: Tensor  # [num_members, 2]: row of the flat batch, and where its part goes; -1: that is the whole of it
    rows: Tensor  # [num_rows, 3]: row of the flat batch, first part, parts; rows without a key have none
    counts: Tensor  # [3]
    sums: Tensor  # [num_parts, num_heads, head_dim] float32
    statistics: Tensor  # [num_parts, num_heads, 2] float32: maximum and total
    most_programs: int  # for items or groups


class AttentionPlan(NamedTuple):
    """What the layers of one window share."""

    block_tables: Tensor  # [num_seqs, max_blocks] int32
    tiles: Tensor  # [num_tiles, 4] int32: sequence, first row, rows, position of the first; the longest first
    tile_rows: int  # of a tile, each query's heads of a KV head
    decode: DecodePlan | None
    window: int  # 0: none


class _Tables(NamedTuple):
    """The integers of a `DecodePlan`, on the host."""

    items: np.ndarray
    groups: np.ndarray
    members: np.ndarray
    rows: np.ndarray
    num_parts: int


class _Rows(NamedTuple):
    """Sequences with one query token each: one entry a row in each array."""

    sequences: np.ndarray
    places: np.ndarray  # in the flat batch
    positions: np.ndarray  # -1: no keys
    first_segments: np.ndarray
    end_segments: np.ndarray


def plan_step(
    batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None, *, tile_rows: int, multiprocessors: int
) -> AttentionPlan:
    """Cut a step into work; a tile of queries has `tile_rows` rows, a power of two, or as many as one token needs."""
    group = num_heads // kv.data.shape[3]
    tile_rows = max(tile_rows, 1 << (group - 1).bit_length())
    starts = list(accumulate(batch.query_lens, initial=0))
    tiles = _query_tiles(batch, starts, tile_rows // group)
    rows = _single_rows(batch, starts, window or 0)
    decode = None
    if len(rows.places):
        programs = multiprocessors * _PROGRAMS_OF_A_MULTIPROCESSOR // kv.data.shape[3]
        tables = _decode_tables(rows, _groups(rows, batch, kv.block_size, group, window), programs)
        decode = _on_device(tables, kv, num_heads)
    return AttentionPlan(batch.block_tables, _uploaded(tiles, kv.data.device), tile_rows, decode, window or 0)


def reserve_decode(
    batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None, max_context_len: int, multiprocessors: int
) -> AttentionPlan:
    """Return a plan that a CUDA graph can read: for up to as many decode rows as `batch`, of up to `max_context_len`.

    The graph keeps the addresses of the plan's tensors, `batch.block_tables` among them. `refill_decode` puts a step's
    integers in it, and this its first ones: no rows at all.
    """
    num_kv_heads, device = kv.data.shape[3], kv.data.device
    num_rows = len(batch.query_lens)
    parts_of_row = -(-max_context_len // SEGMENT)
    # Split rows together have no more segments than the cache, as a rule; what shares blocks beyond that stays whole.
    num_parts = num_rows * min(parts_of_row, 2 + kv.num_blocks * kv.block_size // (SEGMENT * num_rows))

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    decode = DecodePlan(
        items=integers(num_rows + num_parts, ITEM_WIDTH),
        groups=integers(num_parts if window is None else 0, ITEM_WIDTH),
        members=integers(num_rows + 2 * num_parts, 2),
        rows=integers(num_rows, 3),
        counts=integers(3),
        sums=torch.empty((num_parts, num_heads, kv.data.shape[5]), dtype=torch.float32, device=device),
        statistics=torch.empty((num_parts, num_heads, 2), dtype=torch.float32, device=device),
        most_programs=min((num_rows + num_parts) * num_kv_heads, multiprocessors * _PROGRAMS_OF_A_MULTIPROCESSOR),
    )
    return AttentionPlan(batch.block_tables, integers(0, 4), 0, decode, window or 0)


def refill_decode(
    plan: AttentionPlan, batch: AttentionBatch, kv: KVCache, num_heads: int, multiprocessors: int
) -> None:
    """Put a step's integers in a plan that `reserve_decode` made; the copies take their place in the current stream.

    Padded rows have a query of 1 and a context of 0. The block tables are the caller's to put in place.

    Raises `ValueError` if a row of `batch` has several queries, or if there are more rows than were reserved.
    """
    reserved = plan.decode
    if reserved is None or any(length != 1 for length in batch.query_lens):
        raise ValueError("a reserved plan serves rows of one query each; plan other steps with plan_attention")
    if len(batch.query_lens) > len(reserved.rows):
        raise ValueError(f"{len(batch.query_lens)} rows in a plan that was reserved for {len(reserved.rows)}")
    num_kv_heads = kv.data.shape[3]
    window = plan.window or None
    rows = _single_rows(batch, range(len(batch.query_lens) + 1), plan.window)
    groups = _groups(rows, batch, kv.block_size, num_heads // num_kv_heads, window)
    programs = multiprocessors * _PROGRAMS_OF_A_MULTIPROCESSOR // num_kv_heads
    tables = _decode_tables(rows, groups, programs, most_parts=len(reserved.sums))
    targets = (reserved.items, reserved.groups, reserved.members, reserved.rows)
    for target, source in zip(targets, tables[:4], strict=True):
        target[: len(source)].copy_(_uploaded(source, target.device))
    reserved.counts.copy_(_uploaded(_counts(tables), reserved.counts.device))


def _query_tiles(batch: AttentionBatch, starts: list[int], most: int) -> np.ndarray:
    tiles = [
        (sequence, start + first, min(most, length - first), context - length + first)
        for sequence, (start, length, context) in enumerate(
            zip(starts, batch.query_lens, batch.context_lens, strict=False)
        )
        if length > 1
        for first in range(0, length, most)
    ]
    # What ends last is started first.
    tiles.sort(key=lambda tile: -tile[3])
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


def _single_rows(batch: AttentionBatch, starts: Sequence[int], window: int) -> _Rows:
    alone = np.flatnonzero(np.array(batch.query_lens) == 1)
    positions = np.array(batch.context_lens)[alone] - 1
    first_keys = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
    return _Rows(alone, np.array(starts)[alone], positions, first_keys // SEGMENT, positions // SEGMENT + 1)


def _groups(
    rows: _Rows, batch: AttentionBatch, block_size: int, group: int, window: int | None
) -> list[tuple[np.ndarray, int]]:
    """The rows, as indices into `rows`, that share segments, and how many of these."""
    if window is not None or batch.host_block_tables is None:
        return []
    # A row of fewer keys than a segment has none to share.
    able = np.flatnonzero(rows.positions + 1 >= SEGMENT)
    found = prefix_groups(batch.host_block_tables[rows.sequences[able]], GROUP_ROWS // group)
    shared = [
        (able[members], min(num_blocks * block_size, int(rows.positions[able[members]].min()) + 1) // SEGMENT)
        for members, num_blocks in found
    ]
    return [(members, segments) for members, segments in shared if segments]


def _decode_tables(
    rows: _Rows, groups: list[tuple[np.ndarray, int]], programs: int, most_parts: int | None = None
) -> _Tables:
    """Cut rows into items for about so many `programs`, with no more parts than there is room for."""
    shared_work = sum(segments for _, segments in groups)
    own = rows.end_segments - rows.first_segments
    own_work = int(own.sum()) - sum(len(members) * segments for members, segments in groups)
    share = max(1, -(-(own_work + shared_work) // max(1, programs)))
    tables = _cut(rows, groups, share)
    while most_parts is not None and tables.num_parts > most_parts:
        groups, share = [], 2 * share
        tables = _cut(rows, groups, share)
    return tables


def _cut(rows: _Rows, groups: list[tuple[np.ndarray, int]], share: int) -> _Tables:
    """Cut rows of more than `share` segments, and what rows of a group have of their own, into single segments."""
    num_rows = len(rows.places)
    shared_segments, shared_parts = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    for members, segments in groups:
        shared_segments[members] = segments
        shared_parts[members] = 1 if segments <= share else segments
    first_own = rows.first_segments + shared_segments
    own = rows.end_segments - first_own
    whole = (own <= max(share, 1)) & (shared_parts == 0) & (own > 0)
    single = np.where(whole, 0, own)
    parts = shared_parts + single
    first_parts = np.cumsum(parts) - parts

    pieces = np.flatnonzero(single).repeat(single[single > 0])
    within = _counted(single)
    whole_rows = np.flatnonzero(whole)
    of_item = np.concatenate([whole_rows, pieces])
    first = np.concatenate([first_own[whole], first_own[pieces] + within])
    end = np.concatenate([rows.end_segments[whole], first_own[pieces] + within + 1])
    part = np.concatenate([np.full(len(whole_rows), -1), first_parts[pieces] + shared_parts[pieces] + within])
    order = np.argsort(first - end, kind="stable")
    of_item, first, end, part = of_item[order], first[order], end[order], part[order]
    numbers = np.arange(len(of_item))
    items = np.stack(
        [rows.sequences[of_item], numbers, np.ones_like(numbers), rows.positions[of_item], first, end], axis=1
    )
    listed_members = [np.stack([rows.places[of_item], part], axis=1)]
    group_items, num_members = [], len(of_item)
    for of_group, segments in groups:
        num_parts = int(shared_parts[of_group[0]])
        for index in range(num_parts):
            end_segment = segments if num_parts == 1 else index + 1
            last_key = segments * SEGMENT - 1
            sequence = int(rows.sequences[of_group[0]])
            group_items.append((sequence, num_members, len(of_group), last_key, index, end_segment))
            listed_members.append(np.stack([rows.places[of_group], first_parts[of_group] + index], axis=1))
            num_members += len(of_group)
    group_items.sort(key=lambda item: item[4] - item[5])
    listed = ~whole
    return _Tables(
        items.astype(np.int32),
        np.array(group_items, dtype=np.int32).reshape(-1, ITEM_WIDTH),
        np.concatenate(listed_members).astype(np.int32),
        np.stack([rows.places[listed], first_parts[listed], parts[listed]], axis=1).astype(np.int32),
        int(parts.sum()),
    )


def _counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each count, one after the other."""
    starts = np.cumsum(counts) - counts
    numbers: np.ndarray = np.arange(counts.sum()) - np.repeat(starts, counts)
    return numbers


def _counts(tables: _Tables) -> np.ndarray:
    return np.array([len(tables.items), len(tables.groups), len(tables.rows)], dtype=np.int32)


def _on_device(tables: _Tables, kv: KVCache, num_heads: int) -> DecodePlan:
    """One copy for all integers, because each costs the host as much as a launch."""
    device, head_dim = kv.data.device, kv.data.shape[5]
    arrays = [*tables[:4], _counts(tables)]
    flat = _uploaded(np.concatenate([array.ravel() for array in arrays]), device)
    parts = flat.split([array.size for array in arrays])
    items, groups, members, rows, counts = (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))
    most_programs = max(len(tables.items), len(tables.groups)) * kv.data.shape[3]
    sums = torch.empty((tables.num_parts, num_heads, head_dim), dtype=torch.float32, device=device)
    statistics = torch.empty((tables.num_parts, num_heads, 2), dtype=torch.float32, device=device)
    return DecodePlan(items, groups, members, rows, counts, sums, statistics, most_programs)


def _uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device; the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
