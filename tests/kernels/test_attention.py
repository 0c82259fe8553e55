"""Paged attention: the definition against a naive one, the fast path against the definition, and both against noise."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels import reference
from kernels.cache import LARGEST_QUANTIZED, AttentionBatch, KVCache, allocate_kv_cache
from kernels.ops import kernels_for
from tests.kernels.batches import Chunk, flat_batch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
COMPILED_DTYPES = st.sampled_from([torch.bfloat16, torch.int8])
DTYPES_OF_CACHE_AND_MODEL = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.int8, torch.bfloat16),
    (torch.int8, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.bfloat16),
    (torch.float8_e4m3fn, torch.float16),
]
HEADS = st.sampled_from([(1, 1), (14, 2), (5, 1), (9, 3), (7, 1), (4, 4)])
HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128, 256])
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 200]
WINDOWS = st.sampled_from([None, 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 65, 128, 199, 200, 201, 1000])


class Variant(NamedTuple):
    """What a family adds to plain causal attention."""

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Variant()


@st.composite
def variants(draw, num_heads: int) -> Variant:
    sinks = torch.randn(num_heads) * 4 if draw(st.booleans()) else None
    return Variant(draw(WINDOWS), draw(st.sampled_from([None, 0.5, 30.0])), sinks)


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
    values = torch.randn(kv.data[:, :, 1:].shape)
    if kv.scales is not None:
        # Numbers that are stored as these again, in whatever dtype they come.
        largest = LARGEST_QUANTIZED[dtype]
        values = (values * largest / 4).round().clamp(-largest, largest)
        values[..., 0] = largest
        kv.scales[:, :, 1:] = 4 / 2.0 ** torch.randint(7, 10, kv.scales[:, :, 1:].shape)
    kv.data[:, :, 1:] = values.to(dtype)
    return kv


def of_model(dtype: torch.dtype) -> torch.dtype:
    """Of the queries that a cache of `dtype` meets."""
    return dtype if dtype in (torch.float32, torch.float16) else torch.bfloat16


def spoil(kv: KVCache, blocks: int | slice | list[int], offsets: slice, number: float) -> None:
    """Leave numbers that are not finite in some places of some blocks."""
    (kv.data if kv.scales is None else kv.scales)[:, :, blocks, :, offsets] = number


def as_written(kv: KVCache, batch: AttentionBatch) -> KVCache:
    """The same keys and values, in the layout of the kernels that serve this cache: `kv` has the definition's.

    What blocks hold beyond the contexts was written first, by their former owners.
    """
    own = allocate_kv_cache(1, kv.num_blocks, kv.block_size, kv.data.shape[3], kv.data.shape[5], kv.data.dtype, CPU)
    spoil(own, slice(1, None), slice(None), float("nan"))
    layer = kv.layer(0)
    everything = torch.arange(kv.block_size, kv.num_blocks * kv.block_size)
    for slots in (everything, _context_slots(batch, kv.block_size)):
        blocks, offsets = slots // kv.block_size, slots % kv.block_size
        key, value = (
            reference.dequantize_heads(
                cache[blocks, :, offsets],
                None if scales is None else scales[blocks, :, offsets],
                of_model(kv.data.dtype),
            )
            for cache, scales in ((layer.key, layer.key_scales), (layer.value, layer.value_scales))
        )
        kernels_for(CPU).write_kv(key, value, own.layer(0), slots)
    return own


def _context_slots(batch: AttentionBatch, block_size: int) -> Tensor:
    """The slots of all tokens that the sequences of a batch have, in order."""
    positions = [torch.arange(length) for length in batch.context_lens]
    return torch.cat(
        [
            batch.block_tables[row, at // block_size].long() * block_size + at % block_size
            for row, at in enumerate(positions)
        ]
    )


def attend(query: Tensor, kv: KVCache, batch: AttentionBatch, variant: Variant = PLAIN) -> Tensor:
    kernels = kernels_for(CPU)
    kv = as_written(kv, batch)
    plan = kernels.plan_attention(batch, kv, query.shape[1], variant.window)
    scale = query.shape[2] ** -0.5
    return kernels.paged_attention(query, kv.layer(0), plan, scale, variant.softcap, variant.sinks)


def attend_by_definition(query: Tensor, kv: KVCache, batch: AttentionBatch, variant: Variant = PLAIN) -> Tensor:
    return reference.paged_attention(query, kv.layer(0), batch, query.shape[2] ** -0.5, *variant)


def naive_attention(query: Tensor, kv: KVCache, chunks: list[Chunk], variant: Variant) -> Tensor:
    """One query token and one head at a time, in float64, as the formula reads."""
    key, value = kv.layer(0)[:2]
    block_size, group = kv.block_size, query.shape[1] // key.shape[1]
    rows = []
    row = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            seen = range(position + 1)[-variant.window :] if variant.window else range(position + 1)
            places = [(chunk.blocks[p // block_size], p % block_size) for p in seen]
            heads = []
            for head in range(query.shape[1]):
                keys = torch.stack([key[block, head // group, offset] for block, offset in places]).double()
                values = torch.stack([value[block, head // group, offset] for block, offset in places]).double()
                scores = keys @ query[row, head].double() * query.shape[2] ** -0.5
                if variant.softcap:
                    scores = torch.tanh(scores / variant.softcap) * variant.softcap
                weights = scores.exp()
                sink = 0 if variant.sinks is None else variant.sinks[head].double().exp()
                heads.append(weights @ values / (weights.sum() + sink))
            rows.append(torch.stack(heads))
            row += 1
    return torch.stack(rows)


@settings(max_examples=25, deadline=None)
@given(st.data(), HEADS, HEAD_DIMS, st.sampled_from([4, 16]))
def test_the_definition_is_the_formula(data, heads, head_dim, block_size):
    # The last few queries of two sequences: the formula is slow, one key at a time.
    chunks = [
        Chunk(chunk.blocks, chunk.start + chunk.num_tokens - min(chunk.num_tokens, 3), min(chunk.num_tokens, 3))
        for chunk in data.draw(chunks_of_a_step(block_size))[:2]
    ]
    variant = data.draw(variants(heads[0]))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, torch.float32)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim)
    defined = attend_by_definition(query, kv, flat_batch(chunks, block_size), variant)
    torch.testing.assert_close(defined.double(), naive_attention(query, kv, chunks, variant), atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [(14, 2), (5, 1), (9, 3), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 48])
def test_the_definition_is_torchs_own_attention_under_an_explicit_mask(heads, head_dim, window):
    chunk = Chunk((3, 1, 4, 2), 9, 50)
    kv = filled_cache([chunk], 16, heads[1], head_dim, torch.float32)
    query = torch.randn(50, heads[0], head_dim)
    key, value = (cache[list(chunk.blocks)].transpose(0, 1).flatten(1, 2)[:, :59] for cache in kv.layer(0)[:2])
    mask = torch.ones(50, 59, dtype=torch.bool).tril(9)
    if window:
        mask = mask.triu(9 - window + 1)
    expected = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, mask, enable_gqa=True).transpose(0, 1)
    defined = attend_by_definition(query, kv, flat_batch([chunk], 16), Variant(window))
    torch.testing.assert_close(defined, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.data(), HEADS, HEAD_DIMS, st.sampled_from([4, 16, 24, 32, 128]), st.sampled_from(DTYPES_OF_CACHE_AND_MODEL))
def test_the_fast_path_agrees_with_the_definition(data, heads, head_dim, block_size, dtypes):
    cache_dtype, dtype = dtypes
    chunks = data.draw(chunks_of_a_step(block_size))
    variant = data.draw(variants(heads[0]))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, cache_dtype)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim).to(dtype)
    batch = flat_batch(chunks, block_size)
    # A cache that C++ serves is met in bfloat16.
    exact = dtype == torch.float32 and cache_dtype == torch.float32
    tolerance = 1e-5 if exact else 4e-2
    defined = attend_by_definition(query, kv, batch, variant)
    torch.testing.assert_close(attend(query, kv, batch, variant), defined, atol=tolerance, rtol=tolerance)


def test_blocks_that_lie_wholly_outside_of_the_window_are_not_read():
    # The tile of queries 960 to 1023 sees keys from 960 - 100 + 1 = 861 on: the last three of its 27th block.
    chunk = Chunk(tuple(range(1, 33)), 960, 64)
    kv = filled_cache([chunk], 32, 2, 64, torch.float32)
    query = torch.randn(64, 4, 64)
    batch = flat_batch([chunk], 32)
    before = attend(query, kv, batch, Variant(window=100))
    kv.data[:, :, 1:27] = float("nan")
    assert torch.equal(attend(query, kv, batch, Variant(window=100)), before)
    kv.data[:, :, 27, :, -3:] = float("nan")
    assert attend(query, kv, batch, Variant(window=100))[0].isnan().all()


def test_what_a_window_reads_does_not_grow_with_the_context():
    gathered = []
    for blocks in (16, 256):
        chunk = Chunk(tuple(range(1, 1 + blocks)), blocks * 16 - 64, 64)
        kv = filled_cache([chunk], 16, 1, 16, torch.float32)
        plan = kernels_for(CPU).plan_attention(flat_batch([chunk], 16), kv, 1, 128)
        gathered.append(sum(len(group.head_blocks) for group in plan))
    assert gathered[0] == gathered[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_former_owner_left_in_a_block_is_not_seen(dtype):
    chunks = [Chunk((3, 1), 0, 20), Chunk((2, 5), 16, 1)]
    kv = filled_cache(chunks, 16, 2, 64, dtype)
    query = torch.randn(21, 6, 64).to(of_model(dtype))
    batch = flat_batch(chunks, 16)
    before = attend(query, kv, batch)
    spoil(kv, 1, slice(4, None), float("nan"))
    spoil(kv, 5, slice(1, None), float("inf"))
    assert torch.equal(attend(query, kv, batch), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_in_blocks_past_the_context_is_not_seen(dtype):
    # 74 tokens are the end of the first tile, whose padding reaches the block of the last 10; block 7 is for later.
    chunks = [Chunk((1, 2, 3, 4, 5, 6, 7), 10, 80), Chunk((8, 9), 11, 1)]
    kv = filled_cache(chunks, 16, 2, 64, dtype)
    query = torch.randn(81, 6, 64).to(of_model(dtype))
    before = attend(query, kv, flat_batch(chunks, 16))
    spoil(kv, 6, slice(10, None), float("nan"))
    spoil(kv, [7, 9], slice(None), float("nan"))
    assert torch.equal(attend(query, kv, flat_batch(chunks, 16)), before)


@settings(max_examples=50, deadline=None)
@given(st.data(), HEADS, st.sampled_from([16, 64, 128]), st.sampled_from([4, 16, 32]), COMPILED_DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(data, heads, head_dim, block_size, dtype):
    chunks = data.draw(chunks_of_a_step(block_size))
    variant = data.draw(variants(heads[0]))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, dtype)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim).bfloat16()
    together = attend(query, kv, flat_batch(chunks, block_size), variant).split([chunk.num_tokens for chunk in chunks])
    alone = query.split([chunk.num_tokens for chunk in chunks])
    for chunk, rows, expected in zip(chunks, alone, together, strict=True):
        assert torch.equal(attend(rows, kv, flat_batch([chunk], block_size), variant), expected)


@settings(max_examples=50, deadline=None)
@given(st.data(), HEADS, st.sampled_from([16, 64, 128]), st.integers(2, 400), st.lists(st.integers(1, 399), max_size=5))
def test_a_prompt_has_the_same_bits_whole_and_in_chunks(data, heads, head_dim, length, cuts):
    block_size, dtype = data.draw(st.sampled_from([4, 16, 32])), data.draw(COMPILED_DTYPES)
    variant = data.draw(variants(heads[0]))
    blocks = tuple(range(1, -(-length // block_size) + 1))
    whole = Chunk(blocks, 0, length)
    kv = filled_cache([whole], block_size, heads[1], head_dim, dtype)
    query = torch.randn(length, heads[0], head_dim).bfloat16()
    expected = attend(query, kv, flat_batch([whole], block_size), variant)
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for start, end in itertools.pairwise(bounds):
        chunk = flat_batch([Chunk(blocks, start, end - start)], block_size)
        assert torch.equal(attend(query[start:end], kv, chunk, variant), expected[start:end])


@pytest.mark.parametrize("window", [None, 128, 449, 450, 900, 930, 961, 962, 1000, 3000])
@pytest.mark.parametrize("start", [0, 1, 37, 480, 993])
def test_a_long_prompt_has_the_same_bits_whole_and_in_chunks(window, start):
    blocks = tuple(range(1, 41))
    whole = Chunk(blocks, 0, 1280)
    kv = filled_cache([whole], 32, 2, 64, torch.bfloat16)
    query = torch.randn(1280, 4, 64).bfloat16()
    together = attend(query, kv, flat_batch([whole], 32), Variant(window))
    for first, end in itertools.pairwise([start, start + 100, start + 150, start + 151, 1280]):
        chunk = flat_batch([Chunk(blocks, first, end - first)], 32)
        assert torch.equal(attend(query[first:end], kv, chunk, Variant(window)), together[first:end])


@pytest.mark.parametrize("window", [None, 128, 1000, 3000])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_token_after_thousands_has_the_same_bits_as_a_decode_row_and_in_a_chunk(window, with_sinks, dtype):
    blocks = tuple(range(1, 129))
    variant = Variant(window, sinks=torch.randn(4) if with_sinks else None)
    chunk = Chunk(blocks, 4096 - 64, 64)
    kv = filled_cache([chunk], 32, 4, 64, dtype)
    query = torch.randn(64, 4, 64).bfloat16()
    together = attend(query, kv, flat_batch([chunk], 32), variant)
    decoded = [
        attend(query[row : row + 1], kv, flat_batch([Chunk(blocks, 4032 + row, 1)], 32), variant) for row in range(64)
    ]
    assert torch.equal(torch.cat(decoded), together)
