"""Sequences that share blocks, and contexts that are cut for several threads: read otherwise, the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import attention, extension
from tests.kernels.batches import Chunk, flat_batch
from tests.kernels.test_attention import COMPILED_DTYPES, HEADS, PLAIN, attend, filled_cache, variants

pytestmark = pytest.mark.skipif(not extension.is_served(), reason="no compiler, or no processor that is served")


@st.composite
def families(draw, block_size: int) -> list[Chunk]:
    """Chunks of sequences of which some begin in the same blocks, all in one or in parts of them, mixed."""
    free = iter(range(1, 10_000))

    def some(most: int) -> tuple[int, ...]:
        return tuple(next(free) for _ in range(draw(st.integers(0, most))))

    chunks = []
    for _ in range(draw(st.integers(1, 3))):
        root = some(12)
        for _ in range(draw(st.integers(1, 3))):
            branch = root + some(6)
            for _ in range(draw(st.integers(1, 7))):
                length = draw(st.sampled_from([1, 1, 1, 2, 5, 30]))
                computed = len(branch) * block_size + draw(st.integers(0, block_size))
                own = -(-(computed + length) // block_size) - len(branch)
                chunks.append(Chunk(branch + tuple(next(free) for _ in range(own)), computed, length))
    return draw(st.permutations(chunks))


@settings(max_examples=60, deadline=None)
@given(st.data(), HEADS, st.sampled_from([16, 64, 80]), st.sampled_from([16, 32, 64]), COMPILED_DTYPES)
def test_sequences_that_share_blocks_have_the_bits_that_they_have_alone(data, heads, head_dim, block_size, dtype):
    chunks = data.draw(families(block_size))
    variant = data.draw(st.just(PLAIN) | variants(heads[0]))
    kv = filled_cache(chunks, block_size, heads[1], head_dim, dtype)
    query = torch.randn(sum(chunk.num_tokens for chunk in chunks), heads[0], head_dim).bfloat16()
    rows = query.split([chunk.num_tokens for chunk in chunks])
    together = attend(query, kv, flat_batch(chunks, block_size), variant).split([chunk.num_tokens for chunk in chunks])
    for chunk, own, expected in zip(chunks, rows, together, strict=True):
        assert torch.equal(attend(own, kv, flat_batch([chunk], block_size), variant), expected)


def plan_of(chunks: list[Chunk], heads: tuple[int, int], window: int | None = None) -> attention.CompiledPlan:
    kv = filled_cache(chunks, 32, heads[1], 64, torch.bfloat16)
    plan = attention.plan_attention(flat_batch(chunks, 32), kv, heads[0], window)
    assert isinstance(plan, attention.CompiledPlan)
    return plan


def test_a_prefix_is_read_once_for_all_that_share_it() -> None:
    prefix, other = (1, 2, 3, 4, 5), (6, 7)
    chunks = [Chunk((*prefix, 10 + row), 170, 1) for row in range(16)]
    chunks += [Chunk((*other, 40 + row), 70, 1) for row in range(3)]
    plan = plan_of(chunks, (9, 3))
    # Five blocks of 32 are two tiles of 64 and a half, which is read with each row's own.
    assert [(item[1], item[2]) for item in plan.items.tolist()] == [(16, 128), (3, 64)]
    assert sorted(plan.parts[:, 0].tolist()) == list(range(19))


def test_no_key_is_shared_that_one_of_the_sequences_does_not_see() -> None:
    blocks = (1, 2, 3, 4, 5)
    plan = plan_of([Chunk(blocks, 130, 1), Chunk(blocks, 100, 1)], (4, 2))
    assert plan.items[:, 2].tolist() == [64]


def test_with_a_window_nothing_is_shared() -> None:
    plan = plan_of([Chunk((1, 2, 3, 4), 100 + row, 1) for row in range(4)], (4, 2), window=64)
    assert plan.items[:, 1:].tolist() == [[1, 0]] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_long_context_is_cut_for_several_threads_and_has_the_same_bits(dtype: torch.dtype) -> None:
    long = Chunk(tuple(range(1, 141)), 4470, 1)
    many = [long, *(Chunk((150 + row,), 20, 1) for row in range(20))]
    kv = filled_cache(many, 32, 2, 64, dtype)
    query = torch.randn(21, 4, 64).bfloat16()
    batches = flat_batch([long], 32), flat_batch(many, 32)
    plans = [attention.plan_attention(batch, kv, 4) for batch in batches]
    assert [plan.num_segments for plan in plans] == [3, 1]
    alone, among = attend(query[:1], kv, batches[0]), attend(query, kv, batches[1])
    assert torch.equal(alone, among[:1])


@pytest.mark.parametrize("window", [1000, 2048, 2500, 4000])
def test_the_segments_of_a_window_begin_where_it_begins(window: int) -> None:
    long = Chunk(tuple(range(1, 201)), 6300, 4)
    others = [Chunk((250 + row,), 20, 1) for row in range(20)]
    kv = filled_cache([long, *others], 32, 2, 64, torch.bfloat16)
    query = torch.randn(24, 4, 64).bfloat16()
    variant = PLAIN._replace(window=window)
    alone = attend(query[:4], kv, flat_batch([long], 32), variant)
    among = attend(query, kv, flat_batch([long, *others], 32), variant)
    assert torch.equal(alone, among[:4])
