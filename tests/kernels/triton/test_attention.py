"""Paged attention on the interpreter: against the definition, and the same bits whatever shares a row's batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.cache import AttentionBatch, KVCache
from kernels.triton import attention
from kernels.triton.plan import SEGMENT, AttentionPlan
from tests.kernels.batches import Chunk
from tests.kernels.triton.attention_cases import (
    MIXED,
    PLAIN,
    Variant,
    batch_of,
    chunks_of,
    family,
    filled_cache,
    padded,
    queries_of,
)
from tests.kernels.triton.poison import is_poison, poisoned

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


def attend(query: Tensor, kv: KVCache, batch: AttentionBatch, variant: Variant = PLAIN) -> Tensor:
    plan = attention.plan_attention(batch, kv, query.shape[1], variant.window)
    return attend_planned(query, kv, plan, variant)


def attend_planned(query: Tensor, kv: KVCache, plan: AttentionPlan, variant: Variant = PLAIN) -> Tensor:
    scale = query.shape[2] ** -0.5
    return attention.paged_attention(query, kv.layer(0), plan, scale, variant.softcap, variant.sinks)


def check(query: Tensor, kv: KVCache, batch: AttentionBatch, variant: Variant = PLAIN) -> None:
    expected = reference.paged_attention(query, kv.layer(0), batch, query.shape[2] ** -0.5, *variant)
    assert not expected.isnan().any()
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(attend(query, kv, batch, variant), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads", [(7, 1), (5, 1), (6, 2), (4, 4), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_mixed_batch_is_as_defined_for_every_number_of_queries_a_key_has(heads, head_dim):
    chunks = chunks_of(MIXED, 16)
    kv = filled_cache(chunks, 16, heads[1], head_dim)
    check(queries_of(chunks, heads[0], head_dim), kv, batch_of(chunks, 16))


@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_mixed_batch_is_as_defined_for_every_size_of_heads_and_blocks(head_dim, block_size):
    chunks = chunks_of(MIXED, block_size)
    kv = filled_cache(chunks, block_size, 2, head_dim)
    check(queries_of(chunks, 4, head_dim), kv, batch_of(chunks, block_size))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 63, 64, 65, 100, 256, 257, 1000])
def test_a_window_hides_what_lies_before_it(window):
    chunks = chunks_of([(70, 1), (600, 1), (257, 1), (200, 200), (330, 65), (3, 2)], 16)
    kv = filled_cache(chunks, 16, 1, 32)
    check(queries_of(chunks, 2, 32), kv, batch_of(chunks, 16), Variant(window))


@pytest.mark.parametrize("variant", [Variant(softcap=0.5), Variant(softcap=30.0), Variant(40, 5.0, torch.ones(6))])
def test_softcap_and_sinks_are_as_defined(variant):
    chunks = chunks_of([(90, 1), (600, 1), (100, 30), (1, 1)], 32)
    kv = filled_cache(chunks, 32, 2, 32)
    check(queries_of(chunks, 6, 32) * 4, kv, batch_of(chunks, 32), variant)


def test_a_sink_takes_the_weight_of_what_is_attended():
    chunks = chunks_of([(90, 1), (600, 1), (90, 30)], 32)
    kv = filled_cache(chunks, 32, 1, 32)
    for sinks in (torch.tensor([-50.0, 0.0, 8.0]), torch.tensor([60.0, 60.0, 60.0])):
        check(queries_of(chunks, 3, 32), kv, batch_of(chunks, 32), Variant(sinks=sinks))


def test_float32_is_as_exact_as_the_definition():
    chunks = chunks_of([(90, 1), (600, 1), (100, 30)], 16)
    kv = filled_cache(chunks, 16, 2, 48, torch.float32)
    check(queries_of(chunks, 6, 48, torch.float32), kv, batch_of(chunks, 16), Variant(sinks=torch.randn(6)))


@pytest.mark.parametrize("variant", [PLAIN, Variant(50, 20.0, torch.zeros(7))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_keys_and_values_of_float8_are_read_with_their_scales(variant, dtype):
    chunks = [*chunks_of([(90, 1), (600, 1), (100, 30)], 32)]
    kv = filled_cache(chunks, 32, 1, 64, torch.float8_e4m3fn)
    # Each token's head has a scale of its own: their sizes differ a thousandfold.
    kv.scales.mul_(torch.rand_like(kv.scales) * 10 ** torch.randn_like(kv.scales).clamp(-1.5, 0.5))
    check(queries_of(chunks, 7, 64, dtype), kv, batch_of(chunks, 32), variant)


def test_queries_that_are_part_of_a_wider_projection_are_read_in_place():
    chunks = chunks_of(MIXED, 16)
    kv = filled_cache(chunks, 16, 2, 32)
    wide = queries_of(chunks, 10, 32)
    check(wide[:, 2:8], kv, batch_of(chunks, 16))
    check(wide.transpose(0, 1).contiguous().transpose(0, 1)[:, :4], kv, batch_of(chunks, 16))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 560), st.sampled_from([1, 1, 1, 2, 9, 40])), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (14, 2), (5, 1), (9, 3)]),
    st.sampled_from([16, 64, 80]),
    st.sampled_from([16, 64]),
    st.sampled_from([None, 5, 64, 300]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
def test_any_batch_is_as_defined(shapes, heads, head_dim, block_size, window, softcap, has_sinks):
    chunks = chunks_of([(context, min(context, queries)) for context, queries in shapes], block_size)
    kv = filled_cache(chunks, block_size, heads[1], head_dim)
    variant = Variant(window, softcap, torch.randn(heads[0]) if has_sinks else None)
    check(queries_of(chunks, heads[0], head_dim), kv, batch_of(chunks, block_size), variant)


def rows_of(chunks: list[Chunk], x: Tensor) -> list[Tensor]:
    return list(x.split([chunk.num_tokens for chunk in chunks]))


@pytest.mark.parametrize("variant", [PLAIN, Variant(300, None, torch.randn(4))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_a_row_has_the_same_bits_alone_and_among_others(variant, dtype, monkeypatch):
    """Alone its segments are spread over programs; among others one program has all of them.

    Float16 has too few bits to show in which order they are merged.
    """
    monkeypatch.setattr(attention, "_MULTIPROCESSORS_OF_A_CPU", 4)
    chunks = chunks_of([(1000, 1), (513, 1), (300, 70), (512, 1), *[(250, 1)] * 12, (40, 3)], 32)
    kv = filled_cache(chunks, 32, 2, 32, dtype)
    query = queries_of(chunks, 4, 32, torch.float32 if dtype == torch.float32 else torch.float16)
    together = rows_of(chunks, attend(query, kv, batch_of(chunks, 32), variant))
    whole = attention.plan_attention(batch_of(chunks, 32), kv, 4, variant.window)
    assert len(whole.decode.sums) < 8
    for chunk, own, expected in zip(chunks[:4], rows_of(chunks, query), together, strict=False):
        alone = attention.plan_attention(batch_of([chunk], 32), kv, 4, variant.window)
        assert chunk.num_tokens > 1 or len(alone.decode.sums) == len(alone.decode.items) > 1
        assert torch.equal(attend_planned(own, kv, alone, variant), expected)


def test_a_prompts_rows_have_the_same_bits_however_it_is_cut():
    (whole,) = chunks_of([(200, 200)], 16)
    kv = filled_cache([whole], 16, 2, 32)
    query = queries_of([whole], 10, 32)
    for variant in (PLAIN, Variant(70)):
        expected = attend(query, kv, batch_of([whole], 16), variant)
        for cuts in ([0, 100, 200], [0, 3, 5, 64, 130, 200]):
            for start, end in pairwise(cuts):
                part = whole._replace(start=start, num_tokens=end - start)
                assert torch.equal(attend(query[start:end], kv, batch_of([part], 16), variant), expected[start:end])


@pytest.mark.parametrize("multiprocessors", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_rows_that_share_blocks_have_the_bits_that_they_have_alone(dtype, multiprocessors, monkeypatch):
    monkeypatch.setattr(attention, "_MULTIPROCESSORS_OF_A_CPU", multiprocessors)
    chunks = family(2 * SEGMENT + 64, [1, 30, 200, 400, 7], 32)
    kv = filled_cache(chunks, 32, 1, 32, dtype)
    query = queries_of(chunks, 7, 32)
    variant = Variant(sinks=torch.randn(7))
    plan = attention.plan_attention(batch_of(chunks, 32), kv, 7)
    assert len(plan.decode.groups) > 0
    together = rows_of(chunks, attend_planned(query, kv, plan, variant))
    for chunk, own, grouped in zip(chunks, rows_of(chunks, query), together, strict=True):
        assert torch.equal(attend(own, kv, batch_of([chunk], 32), variant), grouped)


def test_rows_that_share_blocks_are_as_defined():
    chunks = [*family(SEGMENT, [1, 30, 300, 40, 7], 32), Chunk(tuple(range(80, 90)), 319, 1)]
    kv = filled_cache(chunks, 32, 2, 64)
    check(queries_of(chunks, 8, 64), kv, batch_of(chunks, 32))


def test_a_shared_prefix_is_read_once_for_all_rows_that_fit_a_tile():
    chunks = family(2 * SEGMENT + 64, [10 + row for row in range(9)], 32)
    kv = filled_cache(chunks, 32, 1, 16)
    groups = attention.plan_attention(batch_of(chunks, 32), kv, 8).decode.groups
    # Four rows of 8 heads are 32; of nine rows one is left alone.
    covered = sorted((members, end - first) for _, _, members, _, first, end in groups.tolist())
    assert sum(members * segments for members, segments in covered) == 8 * 2
    assert {members for members, _ in covered} == {4}


def test_no_segment_is_shared_that_one_of_the_rows_does_not_see():
    blocks = tuple(range(1, 30))
    chunks = [Chunk(blocks, 2 * SEGMENT + 100, 1), Chunk(blocks, 2 * SEGMENT - 2, 1)]
    kv = filled_cache(chunks, 32, 1, 16)
    groups = attention.plan_attention(batch_of(chunks, 32), kv, 2).decode.groups
    assert {end for *_, end in groups.tolist()} == {1}


def test_without_tables_on_the_host_or_with_a_window_nothing_is_shared():
    chunks = family(2 * SEGMENT, [10, 20], 32)
    kv = filled_cache(chunks, 32, 1, 16)
    batch = batch_of(chunks, 32)
    assert len(attention.plan_attention(batch, kv, 2).decode.groups)
    assert not len(attention.plan_attention(batch, kv, 2, 600).decode.groups)
    assert not len(attention.plan_attention(batch._replace(host_block_tables=None), kv, 2).decode.groups)


def test_padded_rows_become_zeros_and_change_no_other():
    chunks = chunks_of([(90, 1), (600, 1)], 32)
    kv = filled_cache(chunks, 32, 1, 32)
    query = torch.cat([queries_of(chunks, 2, 32), poisoned(3, 2, 32, dtype=torch.float16)])
    out = attend(query, kv, padded(batch_of(chunks, 32), 3), Variant(sinks=torch.zeros(2)))
    assert torch.equal(out[:2], attend(query[:2], kv, batch_of(chunks, 32), Variant(sinks=torch.zeros(2))))
    assert torch.equal(out[2:], torch.zeros(3, 2, 32, dtype=torch.float16))


@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_a_reserved_plan_takes_one_step_after_the_other(multiprocessors, monkeypatch):
    """What a CUDA graph does: the same tensors and the same grid, with other integers in them."""
    monkeypatch.setattr(attention, "_MULTIPROCESSORS_OF_A_CPU", multiprocessors)
    chunks = [*family(SEGMENT, [1, 30, 300], 32), Chunk(tuple(range(80, 100)), 600, 1)]
    kv = filled_cache(chunks, 32, 2, 32)
    query = queries_of(chunks, 4, 32)
    block_tables = torch.zeros(6, 32, dtype=torch.int32)
    room = AttentionBatch(torch.zeros(7), torch.zeros(6), block_tables, torch.zeros(6), (1,) * 6, (0,) * 6)
    plan = attention.reserve_plan(room, kv, 4, None, max_context_len=1024)
    addresses = [tensor.data_ptr() for tensor in plan.decode[:7]]
    for step in (chunks, chunks[:2], chunks[2:], chunks[::-1]):
        batch = batch_of(step, 32)
        expected = attend(query[: len(step)], kv, batch)
        block_tables[: len(step), : batch.block_tables.shape[1]] = batch.block_tables
        attention.refill_plan(plan, padded(batch, 6 - len(step)), kv, 4)
        out = attend_planned(torch.cat([query[: len(step)], query[: 6 - len(step)]]), kv, plan)
        assert torch.equal(out[: len(step)], expected)
        assert not out[len(step) :].any()
    assert [tensor.data_ptr() for tensor in plan.decode[:7]] == addresses


def test_a_reserved_plan_leaves_rows_whole_that_it_has_no_room_to_split(monkeypatch):
    monkeypatch.setattr(attention, "_MULTIPROCESSORS_OF_A_CPU", 1000)
    shared = Chunk(tuple(range(1, 33)), 1000, 1)
    chunks = [shared] * 8
    kv = filled_cache(chunks, 32, 1, 16)
    query = queries_of(chunks, 2, 16)
    batch = batch_of(chunks, 32)._replace(host_block_tables=None)
    plan = attention.reserve_plan(batch, kv, 2, None, max_context_len=1024)
    assert len(plan.decode.sums) < len(attention.plan_attention(batch, kv, 2).decode.sums)
    attention.refill_plan(plan, batch, kv, 2)
    assert torch.equal(attend_planned(query, kv, plan), attend(query, kv, batch))


def test_a_reserved_plan_refuses_what_it_cannot_hold():
    chunks = chunks_of([(90, 1), (60, 1)], 32)
    kv = filled_cache(chunks, 32, 1, 16)
    plan = attention.reserve_plan(batch_of(chunks[:1], 32), kv, 2, None, 128)
    with pytest.raises(ValueError, match="2 rows in a plan that was reserved for 1"):
        attention.refill_plan(plan, batch_of(chunks, 32), kv, 2)
    with pytest.raises(ValueError, match="one query each"):
        attention.refill_plan(plan, batch_of(chunks_of([(9, 2)], 32), 32), kv, 2)


def test_what_is_not_served_is_left_to_torch():
    for block_size, head_dim in ((8, 32), (24, 32), (16, 24)):
        chunks = chunks_of([(90, 1), (60, 30)], block_size)
        kv = filled_cache(chunks, block_size, 1, head_dim)
        kv.data.nan_to_num_()
        check(queries_of(chunks, 2, head_dim), kv, batch_of(chunks, block_size))
        with pytest.raises(ValueError, match="not served"):
            attention.reserve_plan(batch_of(chunks, block_size), kv, 2, None, 128)


def test_every_row_of_a_step_is_in_exactly_one_item_or_tile():
    rng = np.random.default_rng(5)
    for _ in range(20):
        shapes = [(int(rng.integers(1, 1500)), 1) for _ in range(int(rng.integers(1, 30)))]
        chunks = chunks_of(shapes, 64)
        kv = filled_cache([Chunk((1,), 0, 1), *[Chunk((max(c.blocks),), 0, 1) for c in chunks]], 64, 1, 16)
        decode = attention.plan_attention(batch_of(chunks, 64), kv, 2).decode
        seen = {row: set() for row in range(len(chunks))}
        for _, member, members, _, first, end in [*decode.items.tolist(), *decode.groups.tolist()]:
            for row, _part in decode.members[member : member + members].tolist():
                assert not seen[row] & set(range(first, end))
                seen[row] |= set(range(first, end))
        assert all(seen[row] == set(range(-(-context // SEGMENT))) for row, (context, _) in enumerate(shapes))
        parts = decode.members[:, 1][decode.members[:, 1] >= 0].tolist()
        assert sorted(parts) == list(range(len(decode.sums)))


def test_rows_that_no_plan_holds_are_not_written(monkeypatch):
    chunks = chunks_of([(40, 1), (33, 5)], 16)
    kv = filled_cache(chunks, 16, 1, 32)
    query = queries_of(chunks, 3, 32)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: poisoned(*shape, **options))
    batch = batch_of(chunks, 16)
    out = attend(torch.cat([query, query]), kv, batch)
    assert not is_poison(out[:6]).any()
    assert is_poison(out[6:]).all()
