"""The paged KV cache: what is written where, and what copies move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.cache import allocate_kv_cache, kv_bytes_per_token
from kernels.ops import copy_block, kernels_for

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 4, 16]), st.integers(1, 5))
def test_each_token_is_stored_at_its_slot_and_nowhere_else(data, block_size, kv_heads):
    kv = allocate_kv_cache(2, 6, block_size, kv_heads, 8, torch.float32, CPU)
    slots = data.draw(st.lists(st.integers(block_size, 6 * block_size - 1), min_size=1, max_size=12, unique=True))
    key, value = torch.randn(2, len(slots), kv_heads, 8)
    kv.data.copy_(torch.randn(kv.data.shape))
    expected = kv.data.clone()
    kernels_for(CPU).write_kv(key, value, kv.layer(1), torch.tensor(slots))
    for row, slot in enumerate(slots):
        expected[1, 0, slot // block_size, :, slot % block_size] = key[row]
        expected[1, 1, slot // block_size, :, slot % block_size] = value[row]
    assert torch.equal(kv.data, expected)


def test_slot_minus_one_stores_nothing():
    kv = allocate_kv_cache(1, 4, 2, 1, 8, torch.float32, CPU)
    key, value = torch.randn(2, 3, 1, 8)
    key[0] = float("nan")
    kv.data.zero_()
    kernels_for(CPU).write_kv(key, value, kv.layer(0), torch.tensor([-1, 5, -1]))
    stored = kv.layer(0).key[2, :, 1].clone()
    kv.data[0, :, 2, :, 1] = 0
    assert torch.equal(stored, key[1])
    assert not kv.data.any()


def test_the_null_block_of_a_new_cache_is_zero():
    # Memory that was just freed is handed out again: without the zeroing the block would hold these numbers.
    torch.full((1, 2, 4, 2, 16, 8), float("nan"))
    assert not allocate_kv_cache(1, 4, 16, 2, 8, torch.float32, CPU).data[:, :, 0].any()


def test_a_copied_block_is_equal_in_all_layers_and_the_rest_is_untouched():
    kv = allocate_kv_cache(3, 6, 4, 2, 8, torch.bfloat16, CPU)
    kv.data.copy_(torch.randn(kv.data.shape))
    before = kv.data.clone()
    copy_block(kv, 1, kv, 5)
    assert torch.equal(kv.data[:, :, 5], before[:, :, 1])
    assert torch.equal(kv.data[:, :, :5], before[:, :, :5])


def test_a_block_goes_to_another_cache_and_back():
    kv, other = (allocate_kv_cache(3, blocks, 4, 2, 8, torch.float32, CPU) for blocks in (6, 3))
    for cache in (kv, other):
        cache.data.copy_(torch.randn(cache.data.shape))
    before = kv.data.clone()
    copy_block(kv, 4, other, 2)
    copy_block(other, 2, kv, 1)
    assert torch.equal(kv.data[:, :, 1], before[:, :, 4])
    assert torch.equal(kv.data[:, :, 2:], before[:, :, 2:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_between_a_gpu_and_pinned_memory_blocks_are_copied_without_allocating():
    gpu = torch.device("cuda")
    kv = allocate_kv_cache(3, 6, 4, 2, 8, torch.float16, gpu)
    host = allocate_kv_cache(3, 4, 4, 2, 8, torch.float16, CPU, pin_memory=True)
    kv.data.copy_(torch.randn(kv.data.shape))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy_block(kv, 5, host, 3)
    copy_block(host, 3, kv, 2)
    copy_block(kv, 2, kv, 1)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    for copied in (host.data[:, :, 3].to(gpu), kv.data[:, :, 2], kv.data[:, :, 1]):
        assert torch.equal(copied, kv.data[:, :, 5])


def test_bytes_per_token_are_those_of_the_allocation():
    kv = allocate_kv_cache(3, 6, 4, 2, 8, torch.bfloat16, CPU)
    assert kv.data.nbytes == 6 * 4 * kv_bytes_per_token(3, 2, 8, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_have_a_place_for_each_token_and_head_and_count_as_its_bytes(dtype):
    kv = allocate_kv_cache(3, 6, 4, 2, 8, dtype, CPU)
    assert kv.scales is not None
    assert kv.scales.shape == (3, 2, 6, 2, 4)
    assert not kv.scales[:, :, 0].any()
    assert sum(tensor.nbytes for tensor in kv.tensors) == 6 * 4 * kv_bytes_per_token(3, 2, 8, dtype)
    for index, layer in enumerate(kv.layers()):
        for mine, its in zip(layer, kv.layer(index), strict=True):
            assert mine.data_ptr() == its.data_ptr()
    assert kv.layer(1).value_scales.data_ptr() == kv.scales[1, 1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_block_takes_its_scales_along(dtype):
    kv, other = (allocate_kv_cache(3, blocks, 4, 2, 8, dtype, CPU) for blocks in (6, 3))
    for tensor in (*kv.tensors, *other.tensors):
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    before = [tensor.clone() for tensor in kv.tensors]
    copy_block(kv, 4, other, 2)
    copy_block(other, 2, kv, 1)
    for tensor, was in zip(kv.tensors, before, strict=True):
        assert torch.equal(tensor[:, :, 1].float(), was[:, :, 4].float())
        assert torch.equal(tensor[:, :, 2:].float(), was[:, :, 2:].float())


@pytest.mark.parametrize(("dtype", "step"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_what_is_stored_in_eight_bits_is_within_half_a_step_of_what_was_given(dtype, step, head_dim):
    kv = allocate_kv_cache(1, 4, 16, 2, head_dim, dtype, CPU)
    key, value = torch.randn(2, 5, 2, head_dim) * torch.tensor([1e-3, 1, 1e4, 0, 1e-39]).view(5, 1, 1)
    slots = torch.tensor([17, 16, 40, -1, 63])
    reference.write_kv(key, value, kv.layer(0), slots)
    blocks, offsets = slots // 16, slots % 16
    for cache, scales, number in zip(kv.layer(0)[:2], kv.layer(0)[2:], (key, value), strict=True):
        found = reference.dequantize_heads(cache[blocks, :, offsets], scales[blocks, :, offsets], torch.float32)
        bound = number.abs().amax(-1, keepdim=True) * step + torch.finfo(torch.float32).tiny
        assert ((found - number).abs() <= bound)[slots >= 0].all()
        assert not cache[0].float().any()
        assert not scales[0].any()


def test_a_large_cache_begins_at_a_page_and_a_small_one_is_whole() -> None:
    large = allocate_kv_cache(2, 600, 32, 3, 64, torch.bfloat16, CPU).data
    assert large.data_ptr() % (2 << 20) == 0
    assert large.is_contiguous()
    large.fill_(1)
    assert allocate_kv_cache(1, 2, 16, 1, 16, torch.bfloat16, CPU).data.shape == (1, 2, 2, 1, 16, 16)
