"""Blocks of the KV cache, all layers in one launch: copied within it, and gathered to be swapped out and back in.

Bytes are moved as words of 32 bits, whatever the cache's dtype is.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache import KVCache
from kernels.reference_blocks import StagedBlocks
from kernels.triton.launch import Specialisation, launch_for

_WORD_BYTES = 4


def serves(kv: KVCache) -> bool:
    """Whether a block of one layer is a number of whole words."""
    return all(math.prod(tensor.shape[3:]) * tensor.itemsize % _WORD_BYTES == 0 for tensor in kv.tensors)


def copy_blocks(kv: KVCache, pairs: Tensor) -> None:
    """As `kernels.reference_blocks.copy_blocks`."""
    for tensor in kv.tensors:
        words = _words(tensor.flatten(0, 1))
        _launch(words, pairs[:, 0], words, pairs[:, 1], len(pairs))


def gather_blocks(kv: KVCache, block_ids: Tensor, staged: StagedBlocks) -> None:
    """As `kernels.reference_blocks.gather_blocks`."""
    for tensor, target in zip(kv.tensors, staged.tensors, strict=True):
        _launch(_words(tensor.flatten(0, 1)), block_ids, _staged_words(target), None, len(block_ids))


def scatter_blocks(staged: StagedBlocks, kv: KVCache, block_ids: Tensor) -> None:
    """As `kernels.reference_blocks.scatter_blocks`."""
    for source, tensor in zip(staged.tensors, kv.tensors, strict=True):
        _launch(_staged_words(source), None, _words(tensor.flatten(0, 1)), block_ids, len(block_ids))


def _words(tensor: Tensor) -> Tensor:
    """Return `[m, n, ...]` as `[m, n, words]` int32."""
    return tensor.flatten(2).view(torch.int32)


def _staged_words(tensor: Tensor) -> Tensor:
    """Return `[num_staged, num_layers, 2, ...]` as words in the order of the cache."""
    return _words(tensor.flatten(1, 2)).transpose(0, 1)


def _launch(
    source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None, num_copied: int
) -> None:
    """Copy blocks of one to the other, both `[num_layers * 2, num_blocks, words]`; ids None are 0, 1, ..."""
    if num_copied == 0:
        return
    num_parts, _, num_words = source.shape
    launch = launch_for("move_blocks", source.device)
    grid = (num_copied, num_parts, triton.cdiv(num_words, launch.meta["BLOCK"]))
    move_blocks_kernel[grid](
        source,
        source_ids,
        target,
        target_ids,
        *source.stride()[:2],
        *target.stride()[:2],
        0 if source_ids is None else source_ids.stride(0),
        0 if target_ids is None else target_ids.stride(0),
        num_words,
        **launch.options,
    )


@triton.jit
def move_blocks_kernel(
    source_ptr,
    source_ids_ptr,
    target_ptr,
    target_ids_ptr,
    source_part_stride,
    source_block_stride,
    target_part_stride,
    target_block_stride,
    source_ids_stride,
    target_ids_stride,
    num_words,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = index
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + index * source_ids_stride).to(tl.int64)
    target = index
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + index * target_ids_stride).to(tl.int64)
    source_ptr += part * source_part_stride + source * source_block_stride
    target_ptr += part * target_part_stride + target * target_block_stride
    inside = word < num_words
    tl.store(target_ptr + word, tl.load(source_ptr + word, mask=inside), mask=inside)


def _specialisation(source_ids: str | None, target_ids: str | None, variant: str) -> Specialisation:
    return Specialisation(
        move_blocks_kernel,
        "move_blocks",
        {
            "source_ptr": "*i32:16",
            "source_ids_ptr": source_ids,
            "target_ptr": "*i32:16",
            "target_ids_ptr": target_ids,
            # Of a large cache a layer's stride is beyond 32 bits.
            "source_part_stride": "i64:16",
            "source_block_stride": "i64:16",
            "target_part_stride": "i64:16",
            "target_block_stride": "i64:16",
            "source_ids_stride": "i32",
            "target_ids_stride": "i32",
            "num_words": "i32:16",
        },
        hot=True,
        variant=variant,
    )


SPECIALISATIONS: tuple[Specialisation, ...] = (
    _specialisation("*i32:16", "*i32", "copy"),
    _specialisation("*i32:16", None, "gather"),
    _specialisation(None, "*i32:16", "scatter"),
)
