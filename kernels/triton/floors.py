"""Draws of what top-k, top-p and min-p keep, without sorting: by a search for the last token of each row that is kept.

A token's key is its distance to the row's largest logit, as the bits of a float that is not negative, which order as
numbers do: the likeliest tokens have the smallest keys, the likeliest of all key 0. Whether the tokens up to a key are
enough, k of them or p of their row's probability, is a sum over the row. A step takes three such sums at once, and
leaves a quarter of the keys:

    lo ────────── m1 ────────── m2 ────────── m3 ────────── hi
       too few       too few       enough                        the last one kept is in (m1, m2]

It ends with a single key, whose tokens, if several have it, are kept or dropped together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_sampling import Limits
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.sampling import gumbel_argmax, largest_by_chunk, row_maximum

_INFINITY = tl.constexpr(0x7F800000)
_BEYOND = tl.constexpr(0x7FFFFFFF)
_LOG2_E = tl.constexpr(1.4426950408889634)


def draw(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """As `kernels.reference_sampling.draw`; each row of `logits` is contiguous."""
    floors = None if limits is None else score_floors(logits, temperatures, limits)
    return gumbel_argmax(logits, temperatures, seeds, positions, floors)


def score_floors(logits: Tensor, temperatures: Tensor, limits: Limits) -> Tensor:
    """As `kernels.reference_sampling.score_floors`; each row of `logits` is contiguous."""
    num_rows, vocab_size = logits.shape
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return floors
    maxima, _ = largest_by_chunk(logits)
    score_floors_kernel[(num_rows,)](
        logits,
        maxima,
        temperatures,
        limits.top_k,
        limits.top_p,
        limits.min_p.log(),
        floors,
        logits.stride(0),
        vocab_size,
        maxima.shape[1],
        MAXIMA=triton.next_power_of_2(maxima.shape[1]),
        **launch_for("score_floors", logits.device).options,
    )
    return floors


@triton.jit
def score_floors_kernel(
    logits_ptr,
    maxima_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    floors_ptr,
    logits_stride,
    vocab_size,
    num_maxima,
    BLOCK: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    largest = row_maximum(maxima_ptr, row, num_maxima, MAXIMA)
    temperature = tl.load(temperatures_ptr + row)
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    sharpness = _LOG2_E / temperature
    last = tl.full((), _INFINITY, tl.int32)
    if (k > 0) & (k < vocab_size):
        last = _last_kept(row_ptr, vocab_size, largest, sharpness, k.to(tl.float32), last, False, BLOCK)
    if p < 1:
        target = p * _weight_up_to(last, row_ptr, vocab_size, largest, sharpness, BLOCK)
        last = _last_kept(row_ptr, vocab_size, largest, sharpness, target, last, True, BLOCK)
    floor = tl.div_rn(-last.to(tl.float32, bitcast=True), temperature)
    tl.store(floors_ptr + row, tl.maximum(floor, tl.load(log_min_p_ptr + row)))


@triton.jit
def _last_kept(row_ptr, size, largest, sharpness, target, hi, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key up to which tokens add up to `target`; those up to `hi` do."""
    lo = hi * 0
    while lo < hi:
        quarter = (hi - lo) >> 2
        m1, m2, m3 = lo + quarter, lo + ((hi - lo) >> 1), hi - 1 - quarter
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        least = tl.full((BLOCK,), _BEYOND, tl.int32)
        most = tl.full((BLOCK,), -1, tl.int32)
        for offset in range(0, size, BLOCK):
            key = _keys(row_ptr, offset, size, largest, BLOCK)
            weight = _weights(key, sharpness) if BY_WEIGHT else 1.0
            sum1 += tl.where(key <= m1, weight, 0.0)
            sum2 += tl.where(key <= m2, weight, 0.0)
            sum3 += tl.where(key <= m3, weight, 0.0)
            least = tl.minimum(least, tl.where(key >= lo, key, _BEYOND))
            most = tl.maximum(most, tl.where(key <= hi, key, -1))
        enough1 = tl.sum(sum1, axis=0) >= target
        enough2 = tl.sum(sum2, axis=0) >= target
        enough3 = tl.sum(sum3, axis=0) >= target
        # Where there are no keys, none need be looked for.
        least, most = tl.min(least, axis=0), tl.max(most, axis=0)
        lo = tl.maximum(tl.where(enough1, lo, tl.where(enough2, m1 + 1, tl.where(enough3, m2 + 1, m3 + 1))), least)
        hi = tl.minimum(tl.where(enough1, m1, tl.where(enough2, m2, tl.where(enough3, m3, hi))), most)
    return lo


@triton.jit
def _weight_up_to(last, row_ptr, size, largest, sharpness, BLOCK: tl.constexpr):
    # Added up as in `_last_kept`, so that a target below all of it is reached there.
    total = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, size, BLOCK):
        key = _keys(row_ptr, offset, size, largest, BLOCK)
        total += tl.where(key <= last, _weights(key, sharpness), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _keys(row_ptr, offset, size, largest, BLOCK: tl.constexpr):
    """Return the keys of a block of tokens; beyond the end of the row they are beyond all others."""
    token = offset + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + token, mask=token < size, other=float("-inf")).to(tl.float32)
    return tl.where(token < size, (largest - x).to(tl.int32, bitcast=True), _BEYOND)


@triton.jit
def _weights(key, sharpness):
    """Return how likely tokens are, the likeliest being 1."""
    exponent = -key.to(tl.float32, bitcast=True) * sharpness
    return tl.where(key < _INFINITY, tl.exp2(exponent), 0.0)


SPECIALISATIONS: tuple[Specialisation, ...] = tuple(
    Specialisation(
        score_floors_kernel,
        "score_floors",
        {
            "logits_ptr": f"*{dtype}:16",
            "maxima_ptr": "*fp32:16",
            "temperatures_ptr": "*fp32:16",
            "top_k_ptr": "*i64:16",
            "top_p_ptr": "*fp32:16",
            "log_min_p_ptr": "*fp32:16",
            "floors_ptr": "*fp32:16",
            "logits_stride": "i32:16",
            "vocab_size": "i32:16",
            "num_maxima": "i32",
            "MAXIMA": 32,
        },
        hot=True,
        variant=dtype,
    )
    for dtype in ("fp32", "bf16")
)
