"""Batches for the attention kernels, which need no pytest: `tests.gpu` runs them on a card."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference
from kernels.cache import AttentionBatch, KVCache, allocate_kv_cache
from tests.kernels.batches import Chunk, flat_batch

CPU = torch.device("cpu")
# Sequences as (context, queries).
MIXED = [(1, 1), (70, 1), (40, 40), (33, 1), (130, 17), (64, 2), (300, 1), (16, 16)]


class Variant(NamedTuple):
    """What a family adds to plain causal attention."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Variant()


def chunks_of(shapes: list[tuple[int, int]], block_size: int) -> list[Chunk]:
    """A sequence for each (context, queries), in blocks of its own that are in no order."""
    needed = [-(-context // block_size) for context, _ in shapes]
    blocks = iter((torch.randperm(sum(needed)) + 1).tolist())
    return [
        Chunk(tuple(next(blocks) for _ in range(count)), context - queries, queries)
        for (context, queries), count in zip(shapes, needed, strict=True)
    ]


def family(prefix: int, own: list[int], block_size: int) -> list[Chunk]:
    """Decode rows that share blocks of `prefix` tokens, and have so many more each."""
    shared = tuple(range(1, prefix // block_size + 1))
    free = iter(range(len(shared) + 1, 10_000))
    chunks = []
    for length in own:
        count = -(-length // block_size)
        chunks.append(Chunk(shared + tuple(next(free) for _ in range(count)), prefix + length - 1, 1))
    return chunks


def batch_of(chunks: list[Chunk], block_size: int, device: torch.device = CPU) -> AttentionBatch:
    batch = flat_batch(chunks, block_size)
    on_device = (tensor.to(device) for tensor in batch[:4])
    return AttentionBatch(*on_device, *batch[4:6], host_block_tables=batch.block_tables.numpy())


def filled_cache(
    chunks: list[Chunk],
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    device: torch.device = CPU,
) -> KVCache:
    """Keys and values of all contexts; whatever belongs to no one is NaN."""
    num_blocks = 1 + max(block for chunk in chunks for block in chunk.blocks)
    kv = allocate_kv_cache(1, num_blocks, block_size, kv_heads, head_dim, dtype, device)
    for tensor in kv.tensors:
        tensor.view(torch.uint8).fill_(0x7F) if tensor.itemsize == 1 else tensor.fill_(float("nan"))
    for chunk in chunks:
        positions = torch.arange(chunk.start + chunk.num_tokens)
        slots = torch.tensor(chunk.blocks)[positions // block_size] * block_size + positions % block_size
        key, value = torch.randn(2, len(slots), kv_heads, head_dim).to(device, torch.float16)
        reference.write_kv(key, value, kv.layer(0), slots.to(device))
    return kv


def queries_of(
    chunks: list[Chunk], heads: int, head_dim: int, dtype: torch.dtype = torch.float16, device: torch.device = CPU
) -> Tensor:
    return torch.randn(sum(chunk.num_tokens for chunk in chunks), heads, head_dim).to(device, dtype)


def padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """The batch with rows of no keys behind it, as a CUDA graph of a fixed size has them."""
    width = batch.block_tables.shape[1]
    tables = torch.cat(
        [batch.block_tables, torch.zeros(rows, width, dtype=torch.int32, device=batch.block_tables.device)]
    )
    return batch._replace(
        block_tables=tables,
        host_block_tables=tables.cpu().numpy(),
        slot_mapping=torch.cat([batch.slot_mapping, batch.slot_mapping.new_full((rows,), -1)]),
        query_lens=(*batch.query_lens, *[1] * rows),
        context_lens=(*batch.context_lens, *[0] * rows),
    )
