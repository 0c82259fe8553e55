"""Heads of queries, keys and values in a kernel: read, normed and turned, and stored.

A head is handled in three pieces, because a turn pairs the first with the second: the two halves of what is turned, and
the rest that is not.
"""

import triton
import triton.language as tl


@triton.jit
def load_pieces(
    ptr, rows, is_head, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr
):
    """Return the pieces of the heads that begin at `rows`, each `[heads, BLOCK or REST]`, in float32."""
    dims = tl.arange(0, BLOCK)
    inside = is_head[:, None] & (dims < HALF)[None, :]
    places = rows[:, None] + dims[None, :]
    first = tl.load(ptr + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(ptr + places + HALF, mask=inside, other=0.0).to(tl.float32)
    rest = first
    if REST > 0:
        dims = 2 * HALF + tl.arange(0, REST)
        inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        rest = tl.load(ptr + rows[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def normed_and_turned(
    ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    token,
    heads,
    num_heads,
    eps,
    PER_HEAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the pieces of the heads at `ptr`, one after the other, as attention wants them."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    is_head = heads < num_heads
    first, second, rest = load_pieces(ptr, heads * HEAD_DIM, is_head, HALF, HEAD_DIM, BLOCK, REST)
    if weight_ptr is not None:
        first, second, rest = _normed(
            first, second, rest, weight_ptr, heads, num_heads, is_head, eps,
            PER_HEAD, IN_FLOAT32, DTYPE, HALF, HEAD_DIM, BLOCK, REST,
        )  # fmt: skip
    if cos_ptr is not None:
        dims = tl.arange(0, BLOCK)
        cos = tl.load(cos_ptr + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        turned = first * cos - second * sin
        second = (second * cos + first * sin).to(DTYPE).to(tl.float32)
        first = turned.to(DTYPE).to(tl.float32)
    return first, second, rest


@triton.jit
def _normed(
    first,
    second,
    rest,
    weight_ptr,
    heads,
    num_heads,
    is_head,
    eps,
    PER_HEAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the pieces normed, each head by itself or all of them together, as `kernels.reference` rounds them."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST > 0:
        squares += tl.sum(rest * rest, 1)
    if PER_HEAD:
        scales = tl.rsqrt(squares / HEAD_DIM + eps)
        weight_rows = heads * 0
    else:
        scales = tl.rsqrt(tl.sum(squares, 0) / (num_heads * HEAD_DIM) + eps) + tl.zeros(squares.shape, tl.float32)
        weight_rows = heads * HEAD_DIM
    first_weight, second_weight, rest_weight = load_pieces(
        weight_ptr, weight_rows, is_head, HALF, HEAD_DIM, BLOCK, REST
    )
    first = _weighted(first * scales[:, None], first_weight, IN_FLOAT32, DTYPE)
    second = _weighted(second * scales[:, None], second_weight, IN_FLOAT32, DTYPE)
    if REST > 0:
        rest = _weighted(rest * scales[:, None], rest_weight, IN_FLOAT32, DTYPE)
    return first, second, rest


@triton.jit
def _weighted(x, weight, IN_FLOAT32: tl.constexpr, DTYPE: tl.constexpr):
    if not IN_FLOAT32:
        x = x.to(DTYPE).to(tl.float32)
    return (x * weight).to(DTYPE).to(tl.float32)


@triton.jit
def store_pieces(
    first,
    second,
    rest,
    ptr,
    rows,
    is_head,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Write pieces to the heads that begin at `rows`, in the dtype of what is there."""
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    dims = tl.arange(0, BLOCK)
    inside = is_head[:, None] & (dims < HALF)[None, :]
    places = rows[:, None] + dims[None, :]
    tl.store(ptr + places, first.to(DTYPE), mask=inside)
    tl.store(ptr + places + HALF, second.to(DTYPE), mask=inside)
    if REST > 0:
        dims = 2 * HALF + tl.arange(0, REST)
        inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(ptr + rows[:, None] + dims[None, :], rest.to(DTYPE), mask=inside)
