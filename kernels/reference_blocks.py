"""Plain torch: the definition of right for moving many blocks of the KV cache at once.

cache      [num_layers, 2, num_blocks, ...]      a block is in as many places as there are layers, times two
staged     [num_staged, num_layers, 2, ...]      a block is one piece, which one copy takes to the host or back
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import KVCache


class StagedBlocks(NamedTuple):
    """Blocks on their way between two memories; `scales` is None where the cache has none."""

    data: Tensor  # [num_staged, num_layers, 2, num_kv_heads, block_size, head_dim]
    scales: Tensor | None = None  # [num_staged, num_layers, 2, num_kv_heads, block_size] float32

    @property
    def tensors(self) -> list[Tensor]:
        """As `KVCache.tensors`, but dimension 0 of each is the block."""
        return [self.data] if self.scales is None else [self.data, self.scales]


def allocate_staged_blocks(
    kv: KVCache, num_staged: int, device: torch.device, *, pin_memory: bool = False
) -> StagedBlocks:
    """Return room for `num_staged` blocks of `kv`; `pin_memory` is for room on the host."""

    def allocate(tensor: Tensor) -> Tensor:
        shape = (num_staged, *tensor.shape[:2], *tensor.shape[3:])
        return torch.empty(shape, dtype=tensor.dtype, device=device, pin_memory=pin_memory)

    return StagedBlocks(*map(allocate, kv.tensors))


def copy_blocks(kv: KVCache, pairs: Tensor) -> None:
    """Copy the first block of each of `pairs`, `[num_pairs, 2]` integers, onto the second, in all layers.

    The copies are made in any order or at once: no block is written twice, and none is written and read as well.
    """
    for tensor in kv.tensors:
        tensor[:, :, pairs[:, 1].long()] = tensor[:, :, pairs[:, 0].long()]


def gather_blocks(kv: KVCache, block_ids: Tensor, staged: StagedBlocks) -> None:
    """Copy blocks `block_ids`, `[n]` integers, to the first n places of `staged`, on the same device."""
    for tensor, target in zip(kv.tensors, staged.tensors, strict=True):
        target[: len(block_ids)] = tensor[:, :, block_ids.long()].movedim(2, 0)


def scatter_blocks(staged: StagedBlocks, kv: KVCache, block_ids: Tensor) -> None:
    """Copy the first n places of `staged` to the blocks `block_ids`, `[n]` distinct integers, on the same device."""
    for source, tensor in zip(staged.tensors, kv.tensors, strict=True):
        tensor[:, :, block_ids.long()] = source[: len(block_ids)].movedim(0, 2)
