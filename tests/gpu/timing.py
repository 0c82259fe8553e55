"""The time that work takes on the device, without the host's: a captured graph, replayed between two events."""

import statistics
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

_MOST_REPLAYS = 40
_LEAST_REPLAYS = 5
# Larger than the L2 cache of any card.
_FLUSHED_BYTES = 256 << 20
_COPIED_BYTES = 2 << 30
_GEMM = 8192


def seconds_of(work: Callable[[], object], *, budget_s: float = 0.5) -> float:
    """The median time of `work`, which finds nothing of its own in the cache. Captured: what it reads must stay alive.

    `work` has run before, so that no compilation is timed. It is replayed some 40 times, or as often as
    `budget_s` seconds allow.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    flushed = _flushed()
    times: list[float] = []
    began = perf_counter()
    while len(times) < _MOST_REPLAYS and (len(times) < _LEAST_REPLAYS or perf_counter() - began < budget_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del kept
    return statistics.median(times)


@cache
def _flushed() -> torch.Tensor:
    return torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")


@cache
def copy_rate() -> float:
    """Bytes a second that a copy within the device's memory moves, those read and those written."""
    source = torch.ones(_COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source))


@cache
def gemm_rate() -> float:
    """Operations a second of a product of two bfloat16 matrices of 8,192 by 8,192, of random numbers."""
    x, weight = (torch.randn(_GEMM, _GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(x)
    return 2 * _GEMM**3 / seconds_of(lambda: torch.mm(x, weight, out=out))
