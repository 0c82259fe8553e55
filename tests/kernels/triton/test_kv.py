"""What is written to the KV cache on the interpreter: against the definition, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.reference import QueryKeyNorms
from kernels.triton import kv as kernels
from tests.kernels.triton.kv_cases import FLOAT8, check_same, numbers, poisoned_cache, some_slots, written

NO_NORMS = QueryKeyNorms(None, None, 1e-6, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, FLOAT8])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 16), (2, 256)])
def test_keys_and_values_are_written_where_their_slots_say(dtype, kv_heads, head_dim):
    source = torch.float16 if dtype == FLOAT8 else dtype
    key, value = torch.randn(2, 7, kv_heads, head_dim, dtype=source)
    slots = some_slots(7, 4, 16)
    cache, expected = (poisoned_cache(4, kv_heads, 16, head_dim, dtype) for _ in range(2))
    kernels.write_kv(key, value, cache.layer(0), slots)
    reference.write_kv(key, value, expected.layer(0), slots)
    check_same(cache, expected, slots)
    if dtype != FLOAT8:
        assert torch.equal(cache.data[0][written(cache)], expected.data[0][written(cache)])


def test_keys_of_any_strides_are_written():
    key, value = torch.randn(2, 2, 5, 32).transpose(1, 2)
    slots = some_slots(5, 3, 16)
    cache, expected = (poisoned_cache(3, 2, 16, 32, torch.float32) for _ in range(2))
    kernels.write_kv(key, value, cache.layer(0), slots)
    reference.write_kv(key, value, expected.layer(0), slots)
    check_same(cache, expected, slots)


def test_nothing_is_written_for_slots_of_minus_one_or_no_tokens():
    cache = poisoned_cache(3, 2, 16, 32, torch.float16)
    key = torch.randn(4, 2, 32).half()
    kernels.write_kv(key, key, cache.layer(0), torch.full((4,), -1))
    kernels.write_kv(key[:0], key[:0], cache.layer(0), torch.zeros(0, dtype=torch.int64))
    kernels.write_qkv(torch.randn(4, 6 * 32).half(), NO_NORMS, None, cache.layer(0), torch.full((4,), -1))
    assert not written(cache).any()


def test_a_scale_of_zeros_is_a_normal_number_and_one_of_infinities_a_nan():
    key = torch.zeros(4, 1, 16)
    key[1, 0, 3], key[2, 0, 12], key[3, 0, 5] = float("inf"), float("nan"), -1e-44
    cache = poisoned_cache(2, 1, 16, 16, FLOAT8)
    kernels.write_kv(key, key, cache.layer(0), torch.arange(16, 20))
    scales = cache.layer(0).key_scales[1, 0, :4]
    assert scales[0] == scales[3] == torch.finfo(torch.float32).tiny
    assert scales[1:3].isnan().all()
    assert not cache.layer(0).key[1, 0, 0].float().any()


def test_a_value_that_stands_out_takes_precision_of_its_own_head_alone():
    key = torch.randn(1, 2, 32)
    key[0, 0, 5] = 1e5
    cache = poisoned_cache(2, 2, 16, 32, FLOAT8)
    kernels.write_kv(key, key, cache.layer(0), torch.tensor([17]))
    error = (numbers(cache)[0, 0, 1, :, 1] - key[0]).abs()
    assert (error[0] > key[0, 0].abs() / 15 + 1e-3).any()
    assert (error[1] <= key[0, 1].abs() / 15 + 1e-3).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from([(2, 1), (7, 1), (10, 2), (9, 3), (4, 4)]),
    st.sampled_from([(16, 16), (64, 64), (80, 80), (96, 48), (64, 16), (256, 256), (64, 0)]),
    st.sampled_from([None, "head", "all"]),
    st.booleans(),
    st.sampled_from([torch.float16, torch.float32, FLOAT8]),
    st.sampled_from([16, 32]),
)
def test_a_projection_is_normed_turned_and_stored_as_defined(heads, dims, norm, in_float32, stored, block_size):
    (num_heads, kv_heads), (head_dim, rotary_dim), num_tokens = heads, dims, 5
    dtype = torch.float16 if stored == FLOAT8 else stored
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = [None, None]
    if norm is not None:
        sizes = [head_dim * (1 if norm == "head" else count) for count in heads]
        weights = [(1 + torch.randn(size) / 4).to(torch.float32 if in_float32 else dtype) for size in sizes]
    norms = QueryKeyNorms(*weights, 1e-5, in_float32)
    angles = torch.rand(num_tokens, rotary_dim // 2) * 6
    rotation = (angles.cos(), angles.sin()) if rotary_dim else None
    slots = some_slots(num_tokens, 3, block_size)
    cache, expected = (poisoned_cache(3, kv_heads, block_size, head_dim, stored) for _ in range(2))
    query = kernels.write_qkv(qkv, norms, rotation, cache.layer(0), slots)
    defined = reference.write_qkv(qkv, norms, rotation, expected.layer(0), slots)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(query, defined, atol=tolerance, rtol=tolerance)
    check_same(cache, expected, slots)


def test_a_projection_that_is_part_of_a_wider_tensor_is_read_in_place():
    wide = torch.randn(4, 200)
    slots = some_slots(4, 3, 16)
    cache, expected = (poisoned_cache(3, 1, 16, 32, torch.float32) for _ in range(2))
    rotation = tuple(torch.rand(4, 32).chunk(2, dim=1))
    for qkv in (wide[:, :160], wide[:, 40:], wide.repeat_interleave(2, 1)[:, :320:2]):
        query = kernels.write_qkv(qkv, NO_NORMS, rotation, cache.layer(0), slots)
        torch.testing.assert_close(query, reference.write_qkv(qkv, NO_NORMS, rotation, expected.layer(0), slots))
        check_same(cache, expected, slots)


def test_a_token_has_the_same_bits_whatever_shares_its_batch():
    qkv = torch.randn(9, 6 * 48).half()
    norms = QueryKeyNorms(torch.rand(48).half(), torch.rand(48).half(), 1e-6, False)
    rotation = (torch.rand(9, 24), torch.rand(9, 24))
    together, alone = (poisoned_cache(2, 2, 16, 48, FLOAT8) for _ in range(2))
    slots = torch.arange(16, 25)
    query = kernels.write_qkv(qkv, norms, rotation, together.layer(0), slots)
    for row in range(9):
        part = slice(row, row + 1)
        turned = (rotation[0][part], rotation[1][part])
        own = kernels.write_qkv(qkv[part], norms, turned, alone.layer(0), slots[part])
        assert torch.equal(own, query[part])
    assert torch.equal(together.data.view(torch.uint8), alone.data.view(torch.uint8))
    assert written(together)[:, 1, :, :9].all()


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 32), (24, 32), (16, 24)])
def test_what_is_not_served_is_left_to_torch(block_size, head_dim):
    slots = torch.tensor([block_size, -1, block_size + 3])
    cache = poisoned_cache(2, 1, block_size, head_dim, torch.float32)
    qkv = torch.randn(3, 3 * head_dim)
    kernels.write_qkv(qkv, NO_NORMS, None, cache.layer(0), slots)
    assert torch.equal(cache.layer(0).value[1, 0, 3], qkv[2, 2 * head_dim :])
    key, value = torch.randn(2, 3, 1, head_dim)
    kernels.write_kv(key, value, cache.layer(0), slots)
    assert torch.equal(cache.layer(0).key[1, 0, 0], key[0, 0])
