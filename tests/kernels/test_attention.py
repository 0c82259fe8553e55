"""Paged attention: the definition against a naive one, the fast path against the definition, and both against noise."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.cache import AttentionBatch, KVCache, allocate_kv_cache
from kernels.ops import kernels_for
from tests.engine.models_fixture import Chunk, flat_batch

CPU = torch.device("cpu")
HEADS = st.sampled_from([(1, 1), (14, 2), (5, 1), (9, 3), (4, 4)])
HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128])
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 200]


@st.composite
def chunks_of_a_step(draw, block_size: int) -> list[Chunk]:
    """Decode rows, whole prompts and chunks of prompts, each in blocks of its own, in no order."""
    shapes = draw(
        st.lists(
            st.tuples(st.sampled_from(LENGTHS) | st.integers(1, 150), st.sampled_from(LENGTHS)), min_size=1, max_size=6
        )
    )
    needed = [-(-context // block_size) for context, _ in shapes]
    blocks = draw(st.permutations(range(1, sum(needed) + 1)))
    chunks = []
    for (context, query), count in zip(shapes, needed, strict=True):
        own, blocks = tuple(blocks[:count]), blocks[count:]
        length = min(query, context)
        chunks.append(Chunk(own, context - length, length))
    return chunks


def filled_cache(chunks: list[Chunk], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    blocks = 1 + max(block for chunk in chunks for block in chunk.blocks)
    kv = allocate_kv_cache(1, blocks, block_size, kv_heads, head_dim, dtype, CPU)
    kv.data[:, :, 1:] = torch.randn_like(kv.data[:, :, 1:])
    return kv


def attend(query: Tensor, kv: KVCache, batch: AttentionBatch) -> Tensor:
    kernels = kernels_for(CPU)
    plan = kernels.plan_attention(batch, kv, query.shape[1])
    return kernels.paged_attention(query, kv.layer(0), plan, query.shape[2] ** -0.5)


def naive_attention(query: Tensor, kv: KVCache, chunks: list[Chunk], scale: float) -> Tensor:
    """One query token and one head at a time, in float64, as the formula reads."""
    key, value = kv.layer(0)
    block_size, group = kv.block_size, query.shape[1] // key.shape[1]
    rows = []
    row = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            places = [(chunk.blocks[p // block_size], p % block_size) for p in range(position + 1)]
            heads = []
            for head in range(query.shape[1]):
                keys = torch.stack([key[block, head // group, offset] for block, offset in places]).double()
                values = torch.stack([value[block, head // group, offset] for block, offset in places]).double()
                heads.append((keys @ query[row, head].double() * scale).softmax(0) @ values)
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)


@settings(max_examples=15, deadline=None)
@given(st.data(), HEADS, HEAD_DIMS, st.sampled_from([4, 16]))
def test_the_definition_is_the_formula(data, heads, head_dim, block_size):
    # The last few queries of two sequences: the formula is slow, one key at a time.
    chunks = [
        Chunk(chunk.blocks, chunk.start + chunk.num_tokens - min(chunk.num_tokens, 3), min(chunk.num_tokens, 3))
        for chunk in data.draw(chunks_of_a_step(block_size))[:2]
    ]
    kv = filled_cache(chunks, block_size, heads[1], head_dim, torch.float32)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim)
    defined = reference.paged_attention(query, kv.layer(0), flat_batch(chunks, block_size), head_dim**-0.5)
    torch.testing.assert_close(defined.double(), naive_attention(query, kv, chunks, head_dim**-0.5), atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.data(), HEADS, HEAD_DIMS, st.sampled_from([4, 16, 32, 128]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_fast_path_agrees_with_the_definition(data, heads, head_dim, block_size, dtype):
    chunks = data.draw(chunks_of_a_step(block_size))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, dtype)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim).to(dtype)
    batch = flat_batch(chunks, block_size)
    defined = reference.paged_attention(query, kv.layer(0), batch, head_dim**-0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(attend(query, kv, batch), defined, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_former_owner_left_in_a_block_is_not_seen(dtype):
    chunks = [Chunk((3, 1), 0, 20), Chunk((2, 5), 16, 1)]
    kv = filled_cache(chunks, 16, 2, 64, dtype)
    query = torch.randn(21, 6, 64).to(dtype)
    batch = flat_batch(chunks, 16)
    before = attend(query, kv, batch)
    kv.data[:, :, 1, :, 4:] = float("nan")
    kv.data[:, :, 5, :, 1:] = float("inf")
    assert torch.equal(attend(query, kv, batch), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_in_blocks_past_the_context_is_not_seen(dtype):
    # 74 tokens are the end of the first tile, whose padding reaches the block of the last 10; block 7 is for later.
    chunks = [Chunk((1, 2, 3, 4, 5, 6, 7), 10, 80), Chunk((8, 9), 11, 1)]
    kv = filled_cache(chunks, 16, 2, 64, dtype)
    query = torch.randn(81, 6, 64).to(dtype)
    before = attend(query, kv, flat_batch(chunks, 16))
    kv.data[:, :, 6, :, 10:] = float("nan")
    kv.data[:, :, [7, 9]] = float("nan")
    assert torch.equal(attend(query, kv, flat_batch(chunks, 16)), before)


@settings(max_examples=30, deadline=None)
@given(st.data(), HEADS, st.sampled_from([16, 64, 128]), st.sampled_from([16, 32]))
def test_a_row_has_the_same_bits_alone_and_among_others(data, heads, head_dim, block_size):
    chunks = data.draw(chunks_of_a_step(block_size))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, torch.bfloat16)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim).bfloat16()
    together = attend(query, kv, flat_batch(chunks, block_size)).split([chunk.num_tokens for chunk in chunks])
    alone = query.split([chunk.num_tokens for chunk in chunks])
    for chunk, rows, expected in zip(chunks, alone, together, strict=True):
        assert torch.equal(attend(rows, kv, flat_batch([chunk], block_size)), expected)


@settings(max_examples=30, deadline=None)
@given(HEADS, st.sampled_from([16, 64, 128]), st.integers(2, 400), st.lists(st.integers(1, 399), max_size=5))
def test_a_prompt_has_the_same_bits_whole_and_in_chunks(heads, head_dim, length, cuts):
    blocks = tuple(range(1, -(-length // 16) + 1))
    whole = Chunk(blocks, 0, length)
    kv = filled_cache([whole], 16, heads[1], head_dim, torch.bfloat16)
    query = torch.randn(length, heads[0], head_dim).bfloat16()
    expected = attend(query, kv, flat_batch([whole], 16))
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for start, end in itertools.pairwise(bounds):
        chunk = Chunk(blocks, start, end - start)
        assert torch.equal(attend(query[start:end], kv, flat_batch([chunk], 16)), expected[start:end])


def test_a_token_after_thousands_has_the_same_bits_as_a_decode_row_and_in_a_chunk():
    blocks = tuple(range(1, 129))
    chunk = Chunk(blocks, 4096 - 64, 64)
    kv = filled_cache([chunk], 32, 4, 64, torch.bfloat16)
    query = torch.randn(64, 4, 64).bfloat16()
    together = attend(query, kv, flat_batch([chunk], 32))
    decoded = [attend(query[row : row + 1], kv, flat_batch([Chunk(blocks, 4032 + row, 1)], 32)) for row in range(64)]
    assert torch.equal(torch.cat(decoded), together)
