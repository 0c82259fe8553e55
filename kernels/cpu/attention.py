"""Paged attention in C++: blocks are read in place, in a layout of their own. See attention.h.

What the C++ does not serve (other types than bfloat16, head sizes that are no multiple of 16) is left to torch's
operations, in the layout of `kernels.cache`. Which of both it is follows from the cache alone.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import reference, torch_attention
from kernels.cache import AttentionBatch, KVCache, LayerKV

_TILE_KEYS = 64
_LANES = 16
# Query rows of a work item, heads that share a KV head among them: their keys, scores and sums stay in a core's cache.
_ROWS_OF_A_TILE = 48


class CompiledPlan(NamedTuple):
    """Work items for all layers of one window, the longest first."""

    block_tables: Tensor  # [num_seqs, max_blocks] int32
    tiles: Tensor  # [num_tiles, 4] int32: sequence, first row in the flat batch, queries, position of the first
    max_queries: int
    window: int  # 0: none


Plan = CompiledPlan | torch_attention.AttentionPlan


def _serves(cache: Tensor) -> bool:
    block_size, head_dim = cache.shape[-2:]
    whole_tiles = _TILE_KEYS % block_size == 0 or block_size % _TILE_KEYS == 0
    return cache.dtype == torch.bfloat16 and head_dim % _LANES == 0 and block_size % _LANES == 0 and whole_tiles


def plan_attention(batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None) -> Plan:
    """Cut a step into work items, from host integers alone, once for all layers of the same `window`."""
    if not _serves(kv.data):
        return torch_attention.plan_attention(batch, kv, num_heads, window)
    most = max(1, _ROWS_OF_A_TILE * kv.data.shape[3] // num_heads)
    starts = accumulate(batch.query_lens, initial=0)
    tiles = np.array(
        [
            (sequence, start + first, min(most, length - first), context - length + first)
            for sequence, (start, length, context) in enumerate(
                zip(starts, batch.query_lens, batch.context_lens, strict=False)
            )
            for first in range(0, length, most)
        ],
        dtype=np.int32,
    )
    # The longest first, so that threads end together.
    order = np.argsort(-(tiles[:, 2].astype(np.int64) * (tiles[:, 3] + tiles[:, 2])), kind="stable")
    return CompiledPlan(batch.block_tables, torch.from_numpy(tiles[order]), int(tiles[:, 2].max()), window or 0)


def write_kv(key: Tensor, value: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None:
    """As `kernels.reference.write_kv`."""
    if _serves(layer.key):
        torch.ops.pagemill_cpu.write_kv(key, value, layer.key, layer.value, slot_mapping)
    else:
        reference.write_kv(key, value, layer, slot_mapping)


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    plan: Plan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the planned batch, as `kernels.reference.paged_attention` defines it.

    Weights are rounded to bfloat16 before they meet the values, unnormalised; all else is float32. A token's result
    depends neither on what shares its batch nor on how its prompt was cut into chunks.
    """
    if not isinstance(plan, CompiledPlan):
        return torch_attention.paged_attention(query, layer, plan, scale, softcap, sinks)
    out: Tensor = torch.ops.pagemill_cpu.paged_attention(
        query,
        layer.key,
        layer.value,
        plan.block_tables,
        plan.tiles,
        plan.max_queries,
        plan.window,
        scale,
        softcap or 0.0,
        sinks,
    )
    return out
