"""What goes into the KV cache: keys and values at their slots, normed, turned and quantised on the way."""

import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.cache import LARGEST_QUANTIZED, LayerKV
from kernels.reference import QueryKeyNorms
from kernels.triton.heads import load_pieces, normed_and_turned, store_pieces
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.tiles import serves_blocks

# The least normal number, of which the reciprocal is finite.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _store_in_cache(
    first,
    second,
    rest,
    cache_ptr,
    scales_ptr,
    heads,
    is_head,
    slot,
    num_kv_heads,
    LARGEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Store a token's heads; with `scales_ptr`, in units of a scale that makes the largest of each head `LARGEST`."""
    places = (slot // BLOCK_SIZE * num_kv_heads + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        # A maximum passes over a NaN; the sum of these zeros is one if anything is not finite.
        zero = tl.sum(first - first, 1) + tl.sum(second - second, 1)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
            zero += tl.sum(rest - rest, 1)
        scales = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), _TINY)
        tl.store(scales_ptr + places, tl.where(zero == 0, scales, float("nan")), mask=is_head)
        first, second = _scaled(first, scales, LARGEST), _scaled(second, scales, LARGEST)
        if REST > 0:
            rest = _scaled(rest, scales, LARGEST)
    store_pieces(first, second, rest, cache_ptr, places * HEAD_DIM, is_head, HALF, HEAD_DIM, BLOCK, REST)


@triton.jit
def _scaled(x, scales, LARGEST: tl.constexpr):
    return tl.clamp(tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)), -LARGEST, LARGEST)


@triton.jit
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    key_stride,
    value_stride,
    num_kv_heads,
    LARGEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Store one token's key and value."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    heads = tl.arange(0, BLOCK_HEADS)
    is_head = heads < num_kv_heads
    if slot >= 0:
        first, second, rest = load_pieces(
            key_ptr, token * key_stride + heads * HEAD_DIM, is_head, HALF, HEAD_DIM, BLOCK, 0
        )
        _store_in_cache(
            first, second, rest, key_cache_ptr, key_scales_ptr, heads, is_head, slot, num_kv_heads,
            LARGEST, BLOCK_SIZE, HALF, HEAD_DIM, BLOCK, 0,
        )  # fmt: skip
        first, second, rest = load_pieces(
            value_ptr, token * value_stride + heads * HEAD_DIM, is_head, HALF, HEAD_DIM, BLOCK, 0
        )
        _store_in_cache(
            first, second, rest, value_cache_ptr, value_scales_ptr, heads, is_head, slot, num_kv_heads,
            LARGEST, BLOCK_SIZE, HALF, HEAD_DIM, BLOCK, 0,
        )  # fmt: skip


@triton.jit
def write_qkv_kernel(
    qkv_ptr,
    query_norm_ptr,
    key_norm_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    qkv_stride,
    num_heads,
    num_kv_heads,
    eps,
    QUERY_NORM_PER_HEAD: tl.constexpr,
    KEY_NORM_PER_HEAD: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
):
    """Of one token: program 0 of the second axis writes the queries, program 1 keys and values."""
    token = tl.program_id(0).to(tl.int64)
    qkv_ptr += token * qkv_stride
    if tl.program_id(1) == 0:
        query_heads = tl.arange(0, BLOCK_HEADS)
        query_first, query_second, query_rest = normed_and_turned(
            qkv_ptr, query_norm_ptr, cos_ptr, sin_ptr, token, query_heads, num_heads, eps,
            QUERY_NORM_PER_HEAD, IN_FLOAT32, HALF, HEAD_DIM, BLOCK, REST,
        )  # fmt: skip
        rows, is_query = (token * num_heads + query_heads) * HEAD_DIM, query_heads < num_heads
        store_pieces(
            query_first, query_second, query_rest, query_ptr, rows, is_query, HALF, HEAD_DIM, BLOCK, REST
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token)
        heads = tl.arange(0, BLOCK_KV_HEADS)
        is_head = heads < num_kv_heads
        if slot >= 0:
            key_ptr = qkv_ptr + num_heads * HEAD_DIM
            first, second, rest = normed_and_turned(
                key_ptr, key_norm_ptr, cos_ptr, sin_ptr, token, heads, num_kv_heads, eps,
                KEY_NORM_PER_HEAD, IN_FLOAT32, HALF, HEAD_DIM, BLOCK, REST,
            )  # fmt: skip
            _store_in_cache(
                first, second, rest, key_cache_ptr, key_scales_ptr, heads, is_head, slot, num_kv_heads,
                LARGEST, BLOCK_SIZE, HALF, HEAD_DIM, BLOCK, REST,
            )  # fmt: skip
            value_ptr = key_ptr + num_kv_heads * HEAD_DIM
            first, second, rest = load_pieces(value_ptr, heads * HEAD_DIM, is_head, HALF, HEAD_DIM, BLOCK, REST)
            _store_in_cache(
                first, second, rest, value_cache_ptr, value_scales_ptr, heads, is_head, slot, num_kv_heads,
                LARGEST, BLOCK_SIZE, HALF, HEAD_DIM, BLOCK, REST,
            )  # fmt: skip


def write_kv(key: Tensor, value: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None:
    """As `kernels.reference.write_kv`."""
    if not serves_blocks(layer.key):
        reference.write_kv(key, value, layer, slot_mapping)
        return
    num_tokens, num_kv_heads, head_dim = key.shape
    if not num_tokens:
        return
    key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
    launch = launch_for("write_kv", key.device)
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        *layer,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        num_kv_heads,
        LARGEST=LARGEST_QUANTIZED.get(layer.key.dtype, 0.0),
        BLOCK_SIZE=layer.key.shape[2],
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=triton.next_power_of_2(num_kv_heads),
        **launch.options,
    )


def write_qkv(
    qkv: Tensor,
    norms: QueryKeyNorms,
    rotation: tuple[Tensor, Tensor] | None,
    layer: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """As `kernels.reference.write_qkv`, in one pass over the projection."""
    if not serves_blocks(layer.key):
        return reference.write_qkv(qkv, norms, rotation, layer, slot_mapping)
    num_tokens, (num_kv_heads, block_size, head_dim) = qkv.shape[0], layer.key.shape[1:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    cos, sin = (x.contiguous() for x in rotation) if rotation is not None else (None, None)
    half = head_dim // 2 if cos is None else cos.shape[1]
    rest = head_dim - 2 * half
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    if not num_tokens:
        return query
    launch = launch_for("write_qkv", qkv.device)
    write_qkv_kernel[(num_tokens, 2)](
        qkv if qkv.stride(1) == 1 else qkv.contiguous(),
        norms.query,
        norms.key,
        cos,
        sin,
        query,
        *layer,
        slot_mapping,
        qkv.stride(0) if qkv.stride(1) == 1 else qkv.shape[1],
        num_heads,
        num_kv_heads,
        norms.eps,
        QUERY_NORM_PER_HEAD=norms.query is not None and len(norms.query) == head_dim,
        KEY_NORM_PER_HEAD=norms.key is not None and len(norms.key) == head_dim,
        IN_FLOAT32=norms.in_float32,
        LARGEST=LARGEST_QUANTIZED.get(layer.key.dtype, 0.0),
        BLOCK_SIZE=block_size,
        HALF=half,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        **launch.options,
    )
    return query


def _types(dtype: str, stored: str) -> dict[str, str | None]:
    return {
        **dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), f"*{stored}:16"),
        **dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32:16" if stored == "fp8e4nv" else None),
        "slots_ptr": "*i64:16",
        "num_kv_heads": "i32",
    }


def _specialisations() -> tuple[Specialisation, ...]:
    listed = []
    for dtype, stored in (("bf16", "bf16"), ("fp16", "fp8e4nv")):
        largest = 448.0 if stored == "fp8e4nv" else 0.0
        arguments = {
            **_types(dtype, stored),
            **dict.fromkeys(("key_ptr", "value_ptr"), f"*{dtype}:16"),
            **dict.fromkeys(("key_stride", "value_stride"), "i32:16"),
            "LARGEST": largest,
            "BLOCK_SIZE": 32,
            "HEAD_DIM": 128,
            "BLOCK": 64,
            "BLOCK_HEADS": 8,
        }
        float8 = stored == "fp8e4nv"
        listed.append(
            Specialisation(write_kv_kernel, "write_kv", arguments, hot=True, float8=float8, variant=f"{dtype} {stored}")
        )
    # Heads of 128 as Llama 8B has them, with the norms of Qwen3 and a float8 cache; of 64 with a norm over all heads;
    # of 96 of which 48 are turned; of 256 as Gemma has them.
    for head_dim, half, heads, kv_heads, norm, stored in (
        (128, 64, 32, 8, None, "bf16"),
        (128, 64, 32, 8, True, "fp8e4nv"),
        (64, 32, 16, 16, False, "bf16"),
        (96, 24, 32, 32, None, "bf16"),
        (256, 128, 16, 8, True, "bf16"),
    ):
        rest = head_dim - 2 * half
        float8 = stored == "fp8e4nv"
        arguments = {
            **_types("bf16", stored),
            **dict.fromkeys(("qkv_ptr", "query_ptr"), "*bf16:16"),
            **dict.fromkeys(("query_norm_ptr", "key_norm_ptr"), None if norm is None else "*bf16:16"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32:16"),
            **dict.fromkeys(("QUERY_NORM_PER_HEAD", "KEY_NORM_PER_HEAD"), bool(norm)),
            "qkv_stride": "i32:16",
            "num_heads": "i32",
            "eps": "fp32",
            "IN_FLOAT32": False,
            "LARGEST": 448.0 if float8 else 0.0,
            "BLOCK_SIZE": 32,
            "HALF": half,
            "HEAD_DIM": head_dim,
            "BLOCK": triton.next_power_of_2(half),
            "REST": triton.next_power_of_2(rest) if rest else 0,
            "BLOCK_HEADS": heads,
            "BLOCK_KV_HEADS": kv_heads,
        }
        variant = f"{head_dim} {heads}:{kv_heads} {stored} norm={norm}"
        listed.append(
            Specialisation(write_qkv_kernel, "write_qkv", arguments, hot=True, float8=float8, variant=variant)
        )
    return tuple(listed)


SPECIALISATIONS = _specialisations()
