"""Paged attention from torch's own operations, for any device.

The step is cut into tiles of up to 64 query tokens of one sequence, which end at the positions that are multiples of
64; a decode row is a tile of one. Tiles with the same number of queries and of padded keys are worked on together: one
gather of their blocks, one batched product for the scores, one softmax, one batched product with the values. With a
sliding window a tile's keys begin near the first that its 64 positions see, so that a step costs what its windows
cost and not its contexts.

In bfloat16 on CPUs a token's result depends neither on what shares its batch nor on how its prompt was cut into chunks:
oneDNN's bfloat16 products give a row the same bits whatever rows it stands among; masked keys add exact zeros; and
where oneDNN cuts the sum over the keys (into parts of 512 up to 1024 keys, of 1024 beyond) follows from the query's
position, because no tile reaches over a multiple of 64. The price is that scores are rounded to bfloat16 before the
float32 softmax, as in Transformers' eager attention, and a quarter of the speed of the fused call on prompts of
thousands of tokens.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import NULL_BLOCK, AttentionBatch, KVCache, LayerKV
from kernels.reference import dequantize_heads

_TILE = 64
# oneDNN changes kernels, and with them the order of sums, on key counts that are no multiple of its own tiles.
_KEY_ALIGNMENT = 32
# What a group's temporaries may take: more falls out of cache, and back to the system's allocator and fresh pages.
_GROUP_BYTES = 2 << 20


class _Tile(NamedTuple):
    sequence: int
    first_row: int  # in the flat batch
    num_queries: int
    context_len: int  # up to and with the tile's last query
    first_block: int  # of the sequence's blocks, the first that is gathered
    num_keys: int  # from that block on, before padding


class TileGroup(NamedTuple):
    """Tiles of equal shape, with the indices and masks that all layers share."""

    rows: Tensor  # [num_tiles * num_queries] int64, their places in the flat batch
    head_blocks: Tensor  # [num_tiles * num_kv_heads * padded_blocks] int64, block * num_kv_heads + head
    mask: Tensor  # [num_tiles, 1, num_queries, 1, num_masked] float32, for the last keys: -inf where one is hidden
    stale: Tensor  # [num_stale] int64, gathered rows past the context's end, in blocks that are in use
    num_tiles: int


AttentionPlan = tuple[TileGroup, ...]


def plan_attention(batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None) -> AttentionPlan:
    """Cut a step into groups of tiles, from host integers alone, once for all layers of the same `window`.

    The query at position `i` sees the keys `i - window < j <= i`, all `j <= i` without a window.
    """
    groups: dict[tuple[int, int], list[_Tile]] = defaultdict(list)
    for tile in _tiles(batch, kv.block_size, window):
        groups[tile.num_queries, _padded_blocks(tile.num_keys, kv.block_size)].append(tile)
    plan = []
    for (num_queries, padded_blocks), tiles in sorted(groups.items()):
        score_bytes = num_queries * num_heads * padded_blocks * kv.block_size * torch.float32.itemsize
        # What has scales is multiplied with them in their dtype.
        block_bytes = kv.data[0, 0, 0].numel() * kv.tensors[-1].itemsize
        for part in _cut(tiles, padded_blocks * block_bytes + score_bytes):
            plan.append(_lay_out(part, num_queries, padded_blocks, batch, kv, window))
    return tuple(plan)


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the planned batch, as `kernels.reference.paged_attention` defines it."""
    out = torch.empty_like(query)
    for group in plan:
        out.index_copy_(0, group.rows, _attend(query.index_select(0, group.rows), layer, group, scale, softcap, sinks))
    return out


def _attend(
    query: Tensor, layer: LayerKV, group: TileGroup, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    num_kv_heads, _, head_dim = layer.key.shape[1:]
    # The query heads of a KV head are rows of one product, so that keys are read once and never expanded.
    folded = query.view(group.num_tiles, -1, num_kv_heads, query.shape[1] // num_kv_heads, head_dim).transpose(1, 2)
    rows = folded.reshape(group.num_tiles * num_kv_heads, -1, head_dim)
    key = _gather(layer.key, layer.key_scales, group, query.dtype)
    scores = torch.bmm(rows, key.transpose(1, 2)).view(*folded.shape[:-1], -1).float().mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    # A sum, because masked_fill of a mask that is broadcast takes three times the softmax.
    scores[..., scores.shape[-1] - group.mask.shape[-1] :].add_(group.mask)
    weights = _softmax(scores, sinks).to(query.dtype).view(len(rows), rows.shape[1], -1)
    if weights.shape[1] == 1:
        # Over thousands of keys a row alone is summed in another order than the same row among others.
        weights = weights.expand(-1, 2, -1)
    value = _gather(layer.value, layer.value_scales, group, query.dtype)
    attended = torch.bmm(weights, value)[:, : rows.shape[1]]
    return attended.view(folded.shape).transpose(1, 2).reshape(query.shape)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys, `[num_tiles, num_kv_heads, num_queries, group, padded_len]`."""
    if sinks is None:
        return scores.softmax(-1)
    _, num_kv_heads, _, group, padded_len = scores.shape
    sink = sinks.float().view(num_kv_heads, 1, group, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :padded_len]


def _gather(cache: Tensor, scales: Tensor | None, group: TileGroup, dtype: torch.dtype) -> Tensor:
    """Copy blocks side by side, as numbers of `dtype`: `[num_tiles * num_kv_heads, padded_len, head_dim]`."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    # The bits are gathered, since few operations serve 8-bit floating-point numbers.
    bits = cache if scales is None else cache.view(torch.int8)
    stored = bits.view(-1, block_size * head_dim).index_select(0, group.head_blocks).view(-1, head_dim)
    if scales is not None:
        scales = scales.view(-1, block_size).index_select(0, group.head_blocks).flatten()
    rows = dequantize_heads(stored.view(cache.dtype), scales, dtype)
    # Neither -inf nor a zero weight silences a NaN or infinity that a block's former owner left.
    rows.index_fill_(0, group.stale, 0)
    return rows.view(group.num_tiles * num_kv_heads, -1, head_dim)


def _tiles(batch: AttentionBatch, block_size: int, window: int | None) -> Iterator[_Tile]:
    alignment = math.lcm(block_size, _KEY_ALIGNMENT)
    row = 0
    for sequence, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        position = context_len - query_len
        while position < context_len:
            full_end = (position // _TILE + 1) * _TILE
            end = min(full_end, context_len)
            first_key, last_key = 0, end
            if window is not None:
                # Both ends follow from the full tile, so that they are the same for every part of it.
                first_key, last_key = max(0, full_end - _TILE - window + 1) // alignment * alignment, full_end
            yield _Tile(sequence, row, end - position, end, first_key // block_size, last_key - first_key)
            row += end - position
            position = end


def _padded_blocks(num_keys: int, block_size: int) -> int:
    """Return the blocks of keys rounded up to a quarter of their power of two: few groups, few wasted keys."""
    step = max(_KEY_ALIGNMENT, 1 << (num_keys.bit_length() - 1) >> 2)
    padded_len = -(-num_keys // step) * step
    return -(-padded_len // block_size)


def _cut(tiles: list[_Tile], bytes_each: int) -> list[list[_Tile]]:
    most = max(1, _GROUP_BYTES // bytes_each)
    parts = -(-len(tiles) // most)
    size = -(-len(tiles) // parts)
    return [tiles[start : start + size] for start in range(0, len(tiles), size)]


def _lay_out(
    tiles: list[_Tile], num_queries: int, padded_blocks: int, batch: AttentionBatch, kv: KVCache, window: int | None
) -> TileGroup:
    device = kv.data.device
    sequences, first_rows, _, context_lens, first_blocks, _ = (
        torch.tensor(column, device=device) for column in zip(*tiles, strict=True)
    )
    within = torch.arange(num_queries, device=device)
    columns = first_blocks.unsqueeze(1) + torch.arange(padded_blocks, device=device)
    width = batch.block_tables.shape[1]
    tables = batch.block_tables.index_select(0, sequences).gather(1, columns.clamp(max=width - 1)).long()
    # A sequence may own blocks past this tile's context: of later tiles, or still to be filled.
    tables.masked_fill_(columns * kv.block_size >= context_lens.unsqueeze(1), NULL_BLOCK)
    heads = torch.arange(kv.data.shape[3], device=device).view(1, -1, 1)
    return TileGroup(
        rows=(first_rows.unsqueeze(1) + within).flatten(),
        head_blocks=(tables.unsqueeze(1) * len(heads[0]) + heads).flatten(),
        mask=_mask(tiles, padded_blocks * kv.block_size, kv.block_size, window).to(device),
        stale=_stale_rows(tiles, padded_blocks * kv.block_size, kv).to(device),
        num_tiles=len(tiles),
    )


def _mask(tiles: list[_Tile], padded_len: int, block_size: int, window: int | None) -> Tensor:
    """Return what is added to the scores of a group's last keys; the keys before them are seen by all its queries."""
    num_queries = tiles[0].num_queries
    seen_by_all = 0 if window is not None else min(tile.context_len for tile in tiles) - num_queries + 1
    first_queries = torch.tensor([tile.context_len - num_queries for tile in tiles])
    first_keys = torch.tensor([tile.first_block * block_size for tile in tiles])
    positions = first_queries[:, None, None] + torch.arange(num_queries).unsqueeze(-1)
    keys = first_keys[:, None, None] + torch.arange(seen_by_all, padded_len)
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, :, None, :]


def _stale_rows(tiles: list[_Tile], padded_len: int, kv: KVCache) -> Tensor:
    """Return which gathered rows follow a context in its last block: past that block all is the null block's zeros."""
    rows: list[int] = []
    num_kv_heads = kv.data.shape[3]
    for index, tile in enumerate(tiles):
        context_end = tile.context_len - tile.first_block * kv.block_size
        end = -(-context_end // kv.block_size) * kv.block_size
        for head in range(index * num_kv_heads, (index + 1) * num_kv_heads):
            rows.extend(range(head * padded_len + context_end, head * padded_len + end))
    return torch.tensor(rows, dtype=torch.int64)
