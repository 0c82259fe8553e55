"""The paged KV cache and the description of one step's batch: the two values every attention kernel reads.

Map of the cache, for one layer (`L`) of a model with `H` KV heads:

    data[L, 0]  keys     block 0 | block 1 | block 2 | ...       block 0 is the null block: never handed out or written,
    data[L, 1]  values   block 0 | block 1 | block 2 | ...       and what padded block-table entries point at

    one block:  head 0: [block_size, head_dim]  head 1: [...]  ...  head H-1     contiguous: gathering is a memcpy

    slot = block * block_size + offset           names one token's place in every layer at once

A cache of 8-bit numbers has a float32 scale beside them for each token and head of the keys, and one of the values:

    scales[L, 0 or 1]        block 0 | block 1 | ...             one block:  [H, block_size]
    number = data * scale                                        see `kernels.reference.quantize_heads`
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.huge_pages import empty_in_huge_pages

NULL_BLOCK = 0
LARGEST_QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes that are stored with scales, and what the largest number of a token's head becomes in them."""


class AttentionBatch(NamedTuple):
    """One step's flat mixed batch: prefill chunks and decode rows together, sequence after sequence.

    The tuples repeat the tensors' contents on the host, so that no kernel has to wait for the device to learn a shape.
    """

    query_start: Tensor  # [num_seqs + 1] int32, cumulative query lengths
    seq_lens: Tensor  # [num_seqs] int32, context length including this step's tokens
    block_tables: Tensor  # [num_seqs, max_blocks] int32, padded with the null block
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset; -1 writes nothing
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    host_block_tables: np.ndarray | None = None  # without them, no kernel looks for blocks that sequences share


class LayerKV(NamedTuple):
    """Keys and values of one layer, each `[num_blocks, num_kv_heads, block_size, head_dim]`, and their scales.

    The scales are `[num_blocks, num_kv_heads, block_size]` float32, or None for a dtype that is stored without.
    """

    key: Tensor
    value: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class KVCache(NamedTuple):
    """The keys and values of all layers in one allocation, and their scales in another where the dtype has any."""

    data: Tensor  # [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]
    scales: Tensor | None = None  # [num_layers, 2, num_blocks, num_kv_heads, block_size] float32

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[4]

    @property
    def tensors(self) -> list[Tensor]:
        """What the cache consists of; dimension 2 of each is the block."""
        return [self.data] if self.scales is None else [self.data, self.scales]

    def layer(self, index: int) -> LayerKV:
        return LayerKV(*(part for tensor in self.tensors for part in tensor[index].unbind()))

    def layers(self) -> list[LayerKV]:
        """All layers at once, which costs about as much as one of them."""
        parts = [tensor.flatten(0, 1).unbind() for tensor in self.tensors]
        return [LayerKV(*layer) for layer in zip(*(part[kind::2] for part in parts for kind in (0, 1)), strict=True)]


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    pin_memory: bool = False,
) -> KVCache:
    """Return a cache of `num_blocks` blocks. The null block is zero; the others hold whatever the memory held.

    Zeroing gigabytes would touch pages that a small job never needs, and takes seconds. `pin_memory` is for a cache on
    the host: a GPU copies from it and to it while the host goes on.
    """

    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type == "cpu" and not pin_memory:
            # Attention reads blocks of a few KiB from all over it. Measured: 29 GB/s, and 18 with pages of 4 KiB.
            tensor = empty_in_huge_pages(math.prod(shape), dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        tensor[:, :, NULL_BLOCK].zero_()
        return tensor

    shape = (num_layers, 2, num_blocks, num_kv_heads, block_size)
    data = allocate((*shape, head_dim), dtype)
    return KVCache(data, allocate(shape, torch.float32) if dtype in LARGEST_QUANTIZED else None)


def copy_block(source: KVCache, src: int, target: KVCache, dst: int) -> None:
    """Copy block `src` of one cache onto block `dst` of the same or another, in all layers, allocating nothing.

    Caches of one shape but for `num_blocks`. Between a GPU and pinned memory the copy takes its place in the current
    stream, and the host does not wait for it.
    """
    for origin, goal in zip(source.tensors, target.tensors, strict=True):
        if origin.device == goal.device:
            goal[:, :, dst].copy_(origin[:, :, src])
            continue
        # One contiguous piece at a time: what is strided would go from device to device through a temporary tensor.
        pieces, places = origin.flatten(0, 1)[:, src], goal.flatten(0, 1)[:, dst]
        for piece, place in zip(pieces, places, strict=True):
            place.copy_(piece, non_blocking=True)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take in all layers together, their scales among them."""
    scale_bytes = torch.float32.itemsize if dtype in LARGEST_QUANTIZED else 0
    return 2 * num_layers * num_kv_heads * (head_dim * dtype.itemsize + scale_bytes)
