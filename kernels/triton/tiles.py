"""What the attention kernels have in common: one tile of keys, the merge of two parts of a softmax, and its end.

A part of a softmax is (maximum, total, sums): the largest score, in units of log 2, the total of the weights
`2 ** (score - maximum)`, and the values' sums by these weights, all in float32. A part of no keys is (`LOWEST`, 0, 0),
which is exactly neutral.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache import KVCache

LOG2_E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: the difference of two of it is 0 where that of two infinities would be a NaN.
LOWEST = tl.constexpr(-1.0e38)
# Scales of float8 values, about 1/448 of the values, would be subnormal weights in float16; a power of two is exact.
FLOAT8_RAISED = tl.constexpr(512.0)

_LARGEST_HEAD = 256


def serves(kv: KVCache) -> bool:
    """Whether these kernels read a cache; others are left to torch's operations."""
    return serves_blocks(kv.data)


def serves_blocks(cache: Tensor) -> bool:
    """Whether these kernels read and write blocks `[..., block_size, head_dim]`."""
    block_size, head_dim = cache.shape[-2:]
    whole_tiles = block_size >= 16 and block_size & (block_size - 1) == 0
    whole_heads = head_dim % 16 == 0 and head_dim <= _LARGEST_HEAD
    # int8 is the CPU's.
    return whole_tiles and whole_heads and cache.is_floating_point()


def head_row(kernel: str, head_dim: int, dtype: torch.dtype) -> str:
    """Return the row of the launch table for heads of this size; all of float32 share one."""
    return f"{kernel}/float32" if dtype == torch.float32 else f"{kernel}/{max(64, triton.next_power_of_2(head_dim))}"


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def attend_tile(
    query,  # [BLOCK_M, BLOCK_D]
    maximum,
    total,
    sums,
    first_key,  # a multiple of BLOCK_N
    positions,  # [BLOCK_M]
    num_keys,  # of the sequence: what is beyond belongs to no one
    table_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    kv_head,
    num_kv_heads,
    scale,
    softcap,
    window,
    MASKED: tl.constexpr,  # False: every query sees every key of the tile
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the part of a softmax (maximum, total, sums) with the keys of one tile added to it."""
    DTYPE: tl.constexpr = query.dtype
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    # One entry a key, not one a block: the compiler loads vectors ahead of the tile that needs them, but no scalars.
    if MASKED:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < num_keys, other=0).to(tl.int64)
    else:
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
    places = (blocks * num_kv_heads + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
    # Neither -inf nor a zero weight silences a NaN or infinity that a block's former owner left.
    is_number = (keys < num_keys)[:, None] & (dims < HEAD_DIM)[None, :] if MASKED else (dims < HEAD_DIM)[None, :]
    offsets = places[:, None] * HEAD_DIM + dims[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:
        key = tl.load(key_ptr + offsets, mask=is_number, other=0.0)
        value = tl.load(value_ptr + offsets, mask=is_number, other=0.0)
    else:
        key = tl.load(key_ptr + offsets)
        value = tl.load(value_ptr + offsets)
    scores = tl.dot(query, tl.trans(key.to(DTYPE)), input_precision="ieee")
    if key_scales_ptr is not None:
        scores *= tl.load(key_scales_ptr + places, mask=keys < num_keys, other=0.0)[None, :]
    if SOFTCAP:
        scores = softcap * _tanh(scores * scale / softcap) * LOG2_E
    else:
        scores *= scale * LOG2_E
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if WINDOW:
            seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    shrunk = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    total = total * shrunk + tl.sum(weights, 1)
    if value_scales_ptr is not None:
        raised = tl.load(value_scales_ptr + places, mask=keys < num_keys, other=0.0) * FLOAT8_RAISED
        weights *= raised[None, :]
    sums = tl.dot(weights.to(DTYPE), value.to(DTYPE), sums * shrunk[:, None], input_precision="ieee")
    return new_maximum, total, sums


@triton.jit
def merge(maximum, total, sums, other_maximum, other_total, other_sums):
    """Return the softmax over the keys of two parts; the order counts, in the last bit.

    The sums are spelled out as fused products, so that every kernel rounds them alike.
    """
    new_maximum = tl.maximum(maximum, other_maximum)
    shrunk, other_shrunk = tl.exp2(maximum - new_maximum), tl.exp2(other_maximum - new_maximum)
    total = tl.fma(total, shrunk, other_total * other_shrunk)
    sums = tl.fma(sums, tl.broadcast_to(shrunk[:, None], sums.shape), other_sums * other_shrunk[:, None])
    return new_maximum, total, sums


@triton.jit
def finish(maximum, total, sums, sinks_ptr, heads, is_row, FLOAT8: tl.constexpr):
    """Return the attended values of rows, in float32; `sinks` is a logit of each head that has no value."""
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        none = tl.zeros(sums.shape, tl.float32)
        maximum, total, sums = merge(maximum, total, sums, sinks, tl.full(sinks.shape, 1.0, tl.float32), none)
    if FLOAT8:
        sums *= 1.0 / FLOAT8_RAISED
    # A row without keys is zeros.
    return sums / tl.where(total == 0, 1.0, total)[:, None]


class Compiled(NamedTuple):
    """What attention over a cache is compiled for: dtypes as Triton names them, queries' and what is `stored`."""

    head_dim: int
    group: int
    dtype: str
    stored: str
    window: bool = False
    softcap: bool = False

    @property
    def block_d(self) -> int:
        padded: int = triton.next_power_of_2(self.head_dim)
        return padded

    @property
    def is_float32(self) -> bool:
        return self.dtype == "fp32"

    @property
    def is_float8(self) -> bool:
        return self.stored == "fp8e4nv"

    @property
    def variant(self) -> str:
        return f"{self.head_dim} {self.group}:1 {self.dtype} {self.stored} window={self.window}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of a `Specialisation` that such kernels have in common. A model with windows has sinks here."""
        return {
            **dict.fromkeys(("query_ptr", "out_ptr"), f"*{self.dtype}:16"),
            **dict.fromkeys(("key_ptr", "value_ptr"), f"*{self.stored}:16"),
            **dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32:16" if self.is_float8 else None),
            **dict.fromkeys(("scale", "softcap"), "fp32"),
            **dict.fromkeys(("table_stride", "num_kv_heads", "window"), "i32"),
            "block_tables_ptr": "*i32:16",
            "query_stride": "i32:16",
            "sinks_ptr": "*bf16:16" if self.window else None,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_SIZE": 32,
        }


COMPILED = (
    Compiled(128, 4, "bf16", "bf16"),
    Compiled(128, 8, "bf16", "bf16", window=True),
    Compiled(128, 4, "bf16", "fp8e4nv"),
    Compiled(64, 7, "bf16", "bf16"),
    Compiled(96, 1, "fp16", "fp16"),
    Compiled(64, 8, "bf16", "fp8e4nv"),
    Compiled(256, 2, "bf16", "bf16", window=True, softcap=True),
    Compiled(256, 8, "bf16", "fp8e4nv"),
    Compiled(64, 3, "fp32", "fp32"),
)
"""Of each kernel that attends a cache."""
