"""Paged attention in C++: blocks are read in place, in a layout of their own. See attention.h.

What the C++ does not serve (caches of other types than bfloat16 and int8, head sizes that are no multiple of 16) is
left to torch's operations, in the layout of `kernels.cache`. Which of both it is follows from the cache alone: a model
that computes in another type than bfloat16 and has such a cache meets it in bfloat16.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import reference, torch_attention
from kernels.cache import AttentionBatch, KVCache, LayerKV
from kernels.reference import QueryKeyNorms

_TILE_KEYS = 64
_SEGMENT_KEYS = 2048
_LANES = 16
# Query rows of a work item, heads that share a KV head among them: what their sums take stays in a core's cache.
_ROWS_OF_AN_ITEM = 48
# The products of int8 keys are summed up in 32 bits.
_LARGEST_INT8_HEAD = 512
# With fewer, the segments of long contexts are spread over threads.
_ITEMS_OF_A_THREAD = 4


class CompiledPlan(NamedTuple):
    """Work items for all layers of one window, the longest first.

    A part is some queries of one sequence. An item is one part, or some short ones whose contexts begin in the same
    blocks: those are read once for all of them.
    """

    block_tables: Tensor  # [num_seqs, max_blocks] int32
    items: Tensor  # [num_items, 3] int32: first part, parts, keys that these share
    parts: Tensor  # [num_parts, 4] int32: sequence, first row in the flat batch, queries, position of the first
    max_queries: int  # of an item
    num_segments: int  # of the longest context, where its segments are to be spread over threads; else 1
    window: int  # 0: none


Plan = CompiledPlan | torch_attention.AttentionPlan


def _serves(cache: Tensor) -> bool:
    block_size, head_dim = cache.shape[-2:]
    whole_tiles = _TILE_KEYS % block_size == 0 or block_size % _TILE_KEYS == 0
    # Not float16: as large as bfloat16, it serves whom bfloat16 has too few digits for, and so do its products.
    served = cache.dtype == torch.bfloat16 or (cache.dtype == torch.int8 and head_dim <= _LARGEST_INT8_HEAD)
    return served and head_dim % _LANES == 0 and block_size % _LANES == 0 and whole_tiles


def plan_attention(batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None) -> Plan:
    """Cut a step into work items, from host integers alone, once for all layers of the same `window`."""
    if not _serves(kv.data):
        return torch_attention.plan_attention(batch, kv, num_heads, window)
    num_kv_heads = kv.data.shape[3]
    most = max(1, _ROWS_OF_AN_ITEM * num_kv_heads // num_heads)
    starts = accumulate(batch.query_lens, initial=0)
    parts = np.array(
        [
            (sequence, start + first, min(most, length - first), context - length + first)
            for sequence, (start, length, context) in enumerate(
                zip(starts, batch.query_lens, batch.context_lens, strict=False)
            )
            for first in range(0, length, most)
        ],
        dtype=np.int32,
    )
    tables = batch.block_tables
    parts, items = _grouped(parts, tables.numpy(), kv.block_size, most) if window is None else (parts, _single(parts))
    # The longest first, so that threads end together.
    costs = np.add.reduceat(parts[:, 2].astype(np.int64) * (parts[:, 3] + parts[:, 2]), items[:, 0])
    items = items[np.argsort(-costs, kind="stable")]
    num_segments = -(-max(batch.context_lens) // _SEGMENT_KEYS)
    if len(items) * num_kv_heads >= _ITEMS_OF_A_THREAD * torch.get_num_threads():
        num_segments = 1
    queries = np.add.reduceat(parts[:, 2], np.sort(items[:, 0]))
    return CompiledPlan(
        tables, torch.from_numpy(items), torch.from_numpy(parts), int(queries.max()), num_segments, window or 0
    )


def _single(parts: np.ndarray) -> np.ndarray:
    """Each part as an item."""
    items = np.zeros((len(parts), 3), dtype=np.int32)
    items[:, 0] = np.arange(len(parts))
    items[:, 1] = 1
    return items


def _grouped(parts: np.ndarray, tables: np.ndarray, block_size: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The parts in order of their items, and the items: short parts that begin in the same blocks are one."""
    first_blocks = tables[parts[:, 0], 0]
    holders = np.bincount(first_blocks)
    # A part alone of its kind, or one that fills an item, is an item.
    shares = (holders[first_blocks] > 1) & (2 * parts[:, 2] <= most)
    if not shares.any():
        return parts, _single(parts)
    alone, together = parts[~shares], parts[shares]
    # In order of their tables' bytes, those that share most are neighbours.
    keys = [table.tobytes() for table in tables[together[:, 0]]]
    together = together[sorted(range(len(keys)), key=keys.__getitem__)]
    firsts, queries = [0], 0
    for place, (sequence, _, num_queries, _) in enumerate(together.tolist()):
        queries += num_queries
        if queries > most or tables[sequence, 0] != tables[together[firsts[-1], 0], 0]:
            firsts.append(place)
            queries = num_queries
    groups = np.split(together, firsts[1:])
    shared = [
        (len(alone) + first, len(group), _shared_keys(group, tables, block_size))
        for first, group in zip(firsts, groups, strict=True)
    ]
    items = np.concatenate([_single(alone), np.array(shared, dtype=np.int32)])
    return np.concatenate([alone, together]), items


def _shared_keys(group: np.ndarray, tables: np.ndarray, block_size: int) -> int:
    """The keys, in whole tiles, that lie in the same blocks for all parts of a group, and that all of them see."""
    same = (tables[group[:, 0]] == tables[group[0, 0]]).all(axis=0)
    num_blocks = len(same) if same.all() else int(same.argmin())
    return min(num_blocks * block_size, int(group[:, 3].min())) // _TILE_KEYS * _TILE_KEYS


def write_kv(key: Tensor, value: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None:
    """As `kernels.reference.write_kv`."""
    if _serves(layer.key):
        torch.ops.pagemill_cpu.write_kv(key.to(torch.bfloat16), value.to(torch.bfloat16), *layer, slot_mapping)
    else:
        reference.write_kv(key, value, layer, slot_mapping)


def write_qkv(
    qkv: Tensor,
    norms: QueryKeyNorms,
    rotation: tuple[Tensor, Tensor] | None,
    layer: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """As `kernels.reference.write_qkv`, in one pass over the projection."""
    if not _serves(layer.key):
        return reference.write_qkv(qkv, norms, rotation, layer, slot_mapping)
    if qkv.dtype != torch.bfloat16:
        query, key, value = reference.split_qkv(qkv, norms, rotation, layer.key.shape[1], layer.key.shape[3])
        write_kv(key, value, layer, slot_mapping)
        return query
    cos, sin = rotation or (None, None)
    turned: Tensor = torch.ops.pagemill_cpu.write_qkv(
        qkv, norms.query, norms.key, norms.eps, not norms.in_float32, cos, sin, *layer, slot_mapping
    )
    return turned


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    plan: Plan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the planned batch, as `kernels.reference.paged_attention` defines it.

    Weights are rounded to bfloat16 before they meet the values, unnormalised; all else is float32. Where the cache is
    int8, queries and weights are rounded to 16-bit integers instead, each row by its largest. A token's result depends
    neither on what shares its batch nor on how its prompt was cut into chunks.
    """
    if not isinstance(plan, CompiledPlan):
        return torch_attention.paged_attention(query, layer, plan, scale, softcap, sinks)
    # As for every operation here: to call `to` where there is nothing to do costs more than to ask.
    narrow = query if query.dtype == torch.bfloat16 else query.to(torch.bfloat16)
    out: Tensor = torch.ops.pagemill_cpu.paged_attention(
        narrow,
        *layer,
        plan.block_tables,
        plan.items,
        plan.parts,
        plan.max_queries,
        plan.num_segments,
        plan.window,
        scale,
        softcap or 0.0,
        sinks,
    )
    return out if query.dtype == torch.bfloat16 else out.to(query.dtype)
