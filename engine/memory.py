"""How large the KV pool is, and the pool in host memory for what is preempted.

CPU     half of what the machine has left once the model is loaded, and no more than lets every row of the batch
        hold 1,024 tokens: what is not used by then only fills up with a cache that others could use
CUDA    gpu_memory_utilization of the device, less what is in use, less what a step of full size takes

Host memory is kept for preempted sequences only where there is a GPU. On a CPU both pools are of the same memory, and
a larger KV pool serves better than a second one.
"""

from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.machine import available_memory

_KV_CACHE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_CPU_SHARE = 0.5
_CPU_TOKENS_PER_ROW = 1024
DEFAULT_GPU_UTILIZATION = 0.9
_CUDA_SWAP_SPACE = 4 * 2**30
_CUDA_SWAP_SHARE = 0.25
# A process itself uses some hundreds of MiB of which torch's allocator does not know.
_CUDA_CONTEXT = 2**30


def kv_cache_dtype(config: EngineConfig, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache of a model that computes in `model_dtype`."""
    return _KV_CACHE_DTYPES.get(config.kv_cache_dtype, model_dtype)


def size_kv_pool(
    config: EngineConfig,
    device: torch.device,
    *,
    bytes_per_token: int,
    tokens_per_request: int,
    max_num_seqs: int,
    reserved_bytes: int = 0,
    run_full_step: Callable[[], None],
) -> int:
    """Return the number of KV blocks, the null block among them; the model is loaded by now.

    `tokens_per_request` is the most that one request may hold; `reserved_bytes` are left to what is loaded later.
    `run_full_step` runs a step as large as the budgets allow, and is called only on a GPU, to measure the memory that
    it takes.

    Raises `ConfigError` if there is no memory for a KV pool.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        available = config.kv_cache_memory
    elif device.type == "cuda":
        utilization = config.gpu_memory_utilization or DEFAULT_GPU_UTILIZATION
        available = _available_on_gpu(device, utilization, run_full_step) - reserved_bytes
    else:
        wanted = max_num_seqs * min(tokens_per_request, _CPU_TOKENS_PER_ROW) * bytes_per_token
        available = min(int(_CPU_SHARE * (available_memory() - reserved_bytes)), wanted)
    num_blocks = available // (bytes_per_token * config.block_size)
    if num_blocks < 2:
        raise ConfigError(
            f"With {max(available, 0) / 2**20:.0f} MiB there is no room for a KV cache.{_other_users(device)}",
            hint="Free some memory, raise kv_cache_memory or gpu_memory_utilization, or take a smaller model.",
        )
    return num_blocks


def size_host_pool(config: EngineConfig, device: torch.device, *, bytes_per_token: int) -> int:
    """Return the number of blocks that `swap_space` holds beside a null block.

    Raises `ConfigError` if it was asked for and is too small for any.
    """
    swap_space = config.swap_space
    if swap_space is None:
        swap_space = min(_CUDA_SWAP_SPACE, int(_CUDA_SWAP_SHARE * available_memory())) if device.type == "cuda" else 0
    num_blocks = swap_space // (bytes_per_token * config.block_size)
    if config.swap_space and num_blocks < 2:
        raise ConfigError(
            f"swap_space of {config.swap_space} bytes does not hold two blocks of {config.block_size} tokens.",
            hint=f"Make it {2 * bytes_per_token * config.block_size} at least, or 0.",
        )
    return max(0, num_blocks - 1)


def _other_users(device: torch.device) -> str:
    """What to say of other processes on a GPU; nothing if they hold little."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others < _CUDA_CONTEXT:
        return ""
    return f" Other processes use {others / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB."


def _available_on_gpu(device: torch.device, utilization: float, run_full_step: Callable[[], None]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_full_step()
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    # What the step left behind in the caching allocator must not count twice.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(utilization * total) - (total - free) - step_bytes
