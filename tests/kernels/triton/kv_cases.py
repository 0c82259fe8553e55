"""Caches that show what was written to them, which need no pytest: `tests.gpu` runs them on a card."""

import torch
from torch import Tensor

from kernels import reference
from kernels.cache import KVCache
from tests.kernels.triton.poison import is_poison, poisoned

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
# One unit in the last place; of float8 two neighbours differ by up to an eighth.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7, FLOAT8: 0.13}


def poisoned_cache(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device = CPU
) -> KVCache:
    shape = (1, 2, num_blocks, kv_heads, block_size)
    if dtype != FLOAT8:
        return KVCache(poisoned(*shape, head_dim, dtype=dtype, device=device))
    data = poisoned(*shape, head_dim, dtype=torch.uint8, device=device).view(FLOAT8)
    return KVCache(data, poisoned(*shape, dtype=torch.float32, device=device))


def written(cache: KVCache) -> Tensor:
    """Which tokens' heads are, `[2, num_blocks, num_kv_heads, block_size]`; each wholly or not at all."""
    data = cache.data[0]
    numbers = ~is_poison(data.view(torch.uint8) if data.dtype == FLOAT8 else data)
    some = numbers.any(-1)
    if data.dtype == FLOAT8:
        assert torch.equal(some, ~is_poison(cache.scales[0]))
    else:
        assert torch.equal(some, numbers.all(-1))
    return some


def numbers(cache: KVCache) -> Tensor:
    return reference.dequantize_heads(cache.data, cache.scales, torch.float32)


def check_same(cache: KVCache, expected: KVCache, slots: Tensor, rtol: float | None = None) -> None:
    """Both hold the same at the slots, and the kernel's nothing elsewhere. Quantised numbers may be neighbours."""
    block_size = cache.block_size
    wanted = torch.zeros_like(written(cache))
    for slot in slots[slots >= 0].tolist():
        wanted[:, slot // block_size, :, slot % block_size] = True
    assert torch.equal(written(cache), wanted)
    found, defined = numbers(cache)[0][wanted], numbers(expected)[0][wanted]
    tolerance = rtol or _TOLERANCE[cache.data.dtype]
    torch.testing.assert_close(found, defined, atol=1e-3, rtol=tolerance, equal_nan=True)
    if cache.data.dtype == FLOAT8:
        torch.testing.assert_close(cache.scales[0][wanted], expected.scales[0][wanted], rtol=2e-3, atol=0)
        assert (found != defined).float().mean() < 0.02


def some_slots(num_tokens: int, num_blocks: int, block_size: int) -> Tensor:
    """Different places, of which each third is left out."""
    slots = (torch.randperm((num_blocks - 1) * block_size) + block_size)[:num_tokens]
    slots[1::3] = -1
    return slots
