"""What the machine can do at most, measured: large products, and large reads and copies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

_GEMM = 2048
# Far beyond any cache, and little beside a machine's memory.
_BUFFER_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class GemmCeilings:
    """Operations a second of a product of two matrices of 2,048 × 2,048; int8 is 0 where torch multiplies none."""

    bf16: float
    int8: float
    fp32: float

    def of(self, products: str) -> float:
        """The ceiling of products of `int8` or a dtype by torch's name; float16 is multiplied as fast as bfloat16."""
        return {"int8": self.int8, "float32": self.fp32}.get(products, self.bf16)


@dataclass(frozen=True, slots=True)
class MemoryCeilings:
    """Bytes a second, read from buffers of 512 MiB, and both read and written by a copy of one to another."""

    read: float
    copy: float


def measure_gemm(device: torch.device, min_seconds: float = 0.4) -> GemmCeilings:
    """Measure each for at least `min_seconds` with torch's threads; the median."""
    return GemmCeilings(
        bf16=gemm_rate(device, torch.bfloat16, min_seconds),
        int8=_int8_rate(device, min_seconds),
        fp32=gemm_rate(device, torch.float32, min_seconds),
    )


def gemm_rate(device: torch.device, dtype: torch.dtype, min_seconds: float) -> float:
    """Measure the operations a second of `x @ weight.T`, both of `dtype`."""
    x, weight = (torch.randn(_GEMM, _GEMM, device=device).to(dtype) for _ in range(2))
    out = torch.empty(_GEMM, _GEMM, device=device, dtype=dtype)
    return 2 * _GEMM**3 / seconds_of(lambda: torch.mm(x, weight.t(), out=out), min_seconds)


def _int8_rate(device: torch.device, min_seconds: float) -> float:
    x, weight = (torch.randint(-127, 128, (_GEMM, _GEMM), device=device, dtype=torch.int8) for _ in range(2))
    try:
        torch._int_mm(x, weight.t())
    except RuntimeError:
        return 0.0
    return 2 * _GEMM**3 / seconds_of(lambda: torch._int_mm(x, weight.t()), min_seconds)


def measure_memory(device: torch.device, min_seconds: float = 0.4) -> MemoryCeilings:
    """Measure each for at least `min_seconds` with torch's threads; the median."""
    source = torch.ones(_BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return MemoryCeilings(
        read=source.nbytes / seconds_of(lambda: torch.dot(source, source), min_seconds),
        copy=2 * source.nbytes / seconds_of(lambda: target.copy_(source), min_seconds),
    )


def seconds_of(call: Callable[[], object], min_seconds: float) -> float:
    """The median time of a call, with torch's threads, after a first one that does not count."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.adaptive_autorange(min_run_time=min_seconds, max_run_time=3 * min_seconds).median)
