"""Where the time of a forward pass goes: linears, attention, glue, and what is none of them."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from kernels.ops import AttentionBatch, KVCache, allocate_kv_cache

_BLOCK_SIZE = 32
_PASSES = 3
_WARM_UP_PASSES = 2
# What names of operations contain. Of nested operations each counts with what it does itself.
_LINEAR = ("linear", "mm", "gemm", "matmul")
_ATTENTION = ("attention",)
_GLUE = ("norm", "rotary", "silu", "gelu", "swiglu", "write_kv", "aten::mul", "aten::add", "aten::pow", "aten::mean")


@dataclass(frozen=True, slots=True)
class StepShares:
    """A forward pass with logits, and the shares of its time; `other` is Python, views, and what has no group."""

    shape: str
    seconds: float
    linear: float
    attention: float
    glue: float
    other: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_shares(decoder: Decoder, device: torch.device, rows: int, new: int, context: int) -> StepShares:
    """Profile passes of `rows` sequences that each compute their last `new` tokens of `context`.

    The shares are of the profiled passes, and the seconds of passes without the profiler.
    """
    kv, batch = batch_of(decoder.config, device, rows=rows, new=new, context=context, layers=decoder.config.num_layers)
    token_ids = torch.randint(decoder.config.vocab_size, (rows * new,), device=device)
    positions = torch.arange(context - new, context, device=device).repeat(rows)
    last = torch.arange(new - 1, rows * new, new, device=device)

    def passes(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            decoder.logits(decoder.forward(token_ids, positions, batch, kv)[last])
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    passes(_WARM_UP_PASSES)
    seconds = passes(_PASSES) / _PASSES
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiler:
        profiled = passes(_PASSES)
    times = {
        event.key: (event.self_device_time_total if on_cuda else event.self_cpu_time_total) / 1e6
        for event in profiler.key_averages()
    }
    linear, attention, glue = _grouped(times)
    parts = (linear / profiled, attention / profiled, glue / profiled)
    return StepShares(f"{rows} × {new} of {context:,} tokens", seconds, *parts, other=1 - sum(parts))


def _grouped(times: dict[str, float]) -> tuple[float, float, float]:
    sums = [0.0, 0.0, 0.0]
    for name, seconds in times.items():
        for place, parts in enumerate((_ATTENTION, _GLUE, _LINEAR)):
            if any(part in name for part in parts):
                sums[place] += seconds
                break
    attention, glue, linear = sums
    return linear, attention, glue


def batch_of(
    config: ModelConfig,
    device: torch.device,
    *,
    rows: int,
    new: int,
    context: int,
    layers: int,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> tuple[KVCache, AttentionBatch]:
    """Return a cache of random keys and values, and a batch of equal sequences, each in blocks of its own."""
    blocks = -(-context // _BLOCK_SIZE)
    sizes = (rows * blocks + 1, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv = allocate_kv_cache(layers, *sizes, kv_dtype, device)
    numbers = torch.randn(kv.data[0].shape, device=device)
    if kv.scales is not None:
        numbers.mul_(40).clamp_(-127, 127)
        kv.scales.fill_(1 / 40)
    kv.data[0].copy_(numbers)
    kv.data[1:].copy_(kv.data[0])
    # Apart from each other, as in a pool that has been in use.
    tables = (torch.randperm(rows * blocks, device=device) + 1).view(rows, blocks)
    positions = torch.arange(context - new, context, device=device)
    slots = tables[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return kv, AttentionBatch(
        query_start=torch.arange(0, rows * new + 1, new, device=device).int(),
        seq_lens=torch.full((rows,), context, device=device).int(),
        block_tables=tables.int(),
        slot_mapping=slots.flatten(),
        query_lens=(new,) * rows,
        context_lens=(context,) * rows,
    )
