"""Moves of many blocks at once, against their definition and against moves one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_blocks
from kernels.cache import KVCache, allocate_kv_cache, copy_block
from kernels.reference_blocks import StagedBlocks, allocate_staged_blocks
from kernels.triton import blocks

CPU = torch.device("cpu")
NUM_BLOCKS = 12
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
IDS = st.permutations(range(1, NUM_BLOCKS))


def _filled(dtype: torch.dtype, *, block_size: int = 4, num_layers: int = 3) -> KVCache:
    """A cache whose bytes are all different from their neighbours'."""
    kv = allocate_kv_cache(num_layers, NUM_BLOCKS, block_size, 2, 36, dtype, CPU)
    for seed, tensor in enumerate(kv.tensors):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(seed)))
    return kv


def _copy(kv: KVCache) -> KVCache:
    return KVCache(*(tensor.clone() for tensor in kv.tensors))


def _same(got: KVCache | StagedBlocks, expected: KVCache | StagedBlocks) -> bool:
    pairs = zip(got.tensors, expected.tensors, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True)
@given(IDS, st.integers(0, 5), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 4, 16]))
def test_copies_of_blocks_are_the_copies_one_by_one_and_nothing_else(dtype, ids, num_pairs, id_dtype, block_size):
    kv = _filled(dtype, block_size=block_size)
    defined, one_by_one = _copy(kv), _copy(kv)
    pairs = torch.tensor(ids[: 2 * num_pairs], dtype=id_dtype).view(-1, 2)
    blocks.copy_blocks(kv, pairs)
    reference_blocks.copy_blocks(defined, pairs)
    for src, dst in pairs.tolist():
        copy_block(one_by_one, src, one_by_one, dst)
    assert _same(kv, one_by_one)
    assert _same(defined, one_by_one)


def test_one_block_may_be_copied_to_many():
    kv = _filled(torch.float8_e4m3fn)
    blocks.copy_blocks(kv, torch.tensor([[5, 1], [5, 2], [5, 9]]))
    for tensor in kv.tensors:
        raw = tensor.view(torch.uint8)
        assert all(torch.equal(raw[:, :, block], raw[:, :, 5]) for block in (1, 2, 9))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True)
@given(IDS, st.integers(0, 6))
def test_gathered_blocks_are_pieces_in_the_order_asked_for(dtype, ids, num_gathered):
    kv = _filled(dtype)
    staged = allocate_staged_blocks(kv, 6, CPU)
    for tensor in staged.tensors:
        tensor.view(torch.uint8).fill_(0x5A)
    expected = StagedBlocks(*(tensor.clone() for tensor in staged.tensors))
    block_ids = torch.tensor(ids[:num_gathered], dtype=torch.int32)
    blocks.gather_blocks(kv, block_ids, staged)
    reference_blocks.gather_blocks(kv, block_ids, expected)
    assert _same(staged, expected)
    assert (staged.data[num_gathered:].view(torch.uint8) == 0x5A).all()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, derandomize=True)
@given(IDS, st.integers(0, 6))
def test_what_was_gathered_comes_back_to_other_blocks(dtype, ids, num_moved):
    kv = _filled(dtype)
    before = _copy(kv)
    staged = allocate_staged_blocks(kv, 6, CPU)
    out, back = torch.tensor(ids).split((6, NUM_BLOCKS - 7))
    out, back = out[:num_moved], back[:num_moved]
    blocks.gather_blocks(kv, out[: len(back)], staged)
    blocks.scatter_blocks(staged, kv, back)
    for src, dst in zip(out.tolist(), back.tolist(), strict=False):
        copy_block(before, src, before, dst)
    assert _same(kv, before)
