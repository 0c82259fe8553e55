"""Paged attention of a flat mixed batch on NVIDIA GPUs, in the cache layout of `kernels.cache`.

What has several query tokens, a prompt or a chunk of one, is worked on here, in tiles of up to 128 rows: the query
heads that share a KV head, of as many tokens as fit (18 of 7 heads each, say). Keys come in tiles at multiples of the
tile's length, whatever the queries, and a tile that a query does not see leaves its sums exactly as they were: a
token's result depends neither on what shares its batch nor on how its prompt was cut into chunks, as long as it is not
a chunk by itself. Those rows are `kernels.triton.decode`'s, whatever else the step holds, for the same reason.

What these kernels do not serve (blocks of fewer than 16 tokens or no power of two, heads of no multiple of 16) is left
to torch's operations. Which of both it is follows from the cache alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import torch_attention
from kernels.cache import AttentionBatch, KVCache, LayerKV
from kernels.triton.decode import attend_rows
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.plan import AttentionPlan, plan_step, refill_decode, reserve_decode
from kernels.triton.tiles import COMPILED, LOWEST, attend_tile, finish, head_row, serves

Plan = AttentionPlan | torch_attention.AttentionPlan

# For the interpreter, which has no card to fill.
_MULTIPROCESSORS_OF_A_CPU = 8


@triton.jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    tiles_ptr,
    sinks_ptr,
    out_ptr,
    scale,
    softcap,
    query_stride,
    table_stride,
    num_kv_heads,
    window,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend one tile of queries, for one KV head."""
    # The heads of a tile are neighbours, and with them the places of a block that they read.
    kv_head, tile_ptr = tl.program_id(0) % num_kv_heads, tiles_ptr + tl.program_id(0) // num_kv_heads * 4
    table_ptr = block_tables_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride
    num_tokens, position = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    tile_rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = tile_rows // GROUP
    is_row = token < num_tokens
    row = tl.load(tile_ptr + 1).to(tl.int64) + token
    heads = kv_head * GROUP + tile_rows % GROUP
    is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (row * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    query = tl.load(query_ptr + offsets, mask=is_number, other=0.0)
    positions = position + tl.minimum(token, num_tokens - 1)
    num_keys = position + num_tokens
    maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # Tiles from `first_whole` to `end_whole` are seen by all queries.
    first_whole, end_whole, end = 0, (position + 1) // BLOCK_N, tl.cdiv(num_keys, BLOCK_N)
    if WINDOW:
        first_whole = tl.cdiv(tl.maximum(num_keys - window, 0), BLOCK_N)
        end_whole = tl.maximum(first_whole, end_whole)
        first_whole = tl.minimum(first_whole, end)
        for tile in range(tl.maximum(position - window + 1, 0) // BLOCK_N, first_whole):
            maximum, total, sums = attend_tile(
                query, maximum, total, sums, tile * BLOCK_N, positions, num_keys, table_ptr,
                key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, kv_head, num_kv_heads, scale, softcap, window,
                True, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
    for tile in range(first_whole, end_whole):
        maximum, total, sums = attend_tile(
            query, maximum, total, sums, tile * BLOCK_N, positions, num_keys, table_ptr,
            key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, kv_head, num_kv_heads, scale, softcap, window,
            False, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
    for tile in range(end_whole, end):
        maximum, total, sums = attend_tile(
            query, maximum, total, sums, tile * BLOCK_N, positions, num_keys, table_ptr,
            key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, kv_head, num_kv_heads, scale, softcap, window,
            True, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip

    out = finish(maximum, total, sums, sinks_ptr, heads, is_row, key_scales_ptr is not None)
    places = (row * num_kv_heads * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_number)


def plan_attention(batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None = None) -> Plan:
    """Cut a step into work, from host integers alone, once for all layers of the same `window`.

    With `batch.host_block_tables`, rows that begin in the same blocks read those once.
    """
    if not serves(kv):
        return torch_attention.plan_attention(batch, kv, num_heads, window)
    device = kv.data.device
    tile_rows = launch_for(head_row("attention", kv.data.shape[5], kv.data.dtype), device).meta["BLOCK_M"]
    return plan_step(batch, kv, num_heads, window, tile_rows=tile_rows, multiprocessors=_multiprocessors(device))


def reserve_plan(
    batch: AttentionBatch, kv: KVCache, num_heads: int, window: int | None, max_context_len: int
) -> AttentionPlan:
    """Return a plan whose tensors a CUDA graph may keep, for as many decode rows as `batch`; `refill_plan` fills it.

    Raises `ValueError` for a cache that Triton's kernels do not serve: torch's operations cannot be captured.
    """
    if not serves(kv):
        raise ValueError(f"no CUDA graph of attention over blocks {tuple(kv.data.shape[3:])}: they are not served")
    return reserve_decode(batch, kv, num_heads, window, max_context_len, _multiprocessors(kv.data.device))


def refill_plan(plan: AttentionPlan, batch: AttentionBatch, kv: KVCache, num_heads: int) -> None:
    """Put a step's integers into a reserved plan before its graph is replayed; see `refill_decode`."""
    refill_decode(plan, batch, kv, num_heads, _multiprocessors(kv.data.device))


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    plan: Plan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the planned batch, as `kernels.reference.paged_attention` defines it.

    Weights are rounded to the query's dtype before they meet the values, unnormalised; all else is float32. Rows that
    the plan does not hold are left as they were allocated.
    """
    if not isinstance(plan, AttentionPlan):
        return torch_attention.paged_attention(query, layer, plan, scale, softcap, sinks)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if len(plan.tiles):
        _attend_tiles(query, out, layer, plan, scale, softcap, sinks)
    if plan.decode is not None:
        attend_rows(query, out, layer, plan.block_tables, plan.decode, plan.window, scale, softcap, sinks)
    return out


def _attend_tiles(
    query: Tensor,
    out: Tensor,
    layer: LayerKV,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = layer.key.shape[1:3]
    launch = launch_for(head_row("attention", head_dim, query.dtype), query.device)
    attention_kernel[(len(plan.tiles) * num_kv_heads,)](
        query,
        layer.key,
        layer.value,
        layer.key_scales,
        layer.value_scales,
        plan.block_tables,
        plan.tiles,
        sinks,
        out,
        scale,
        softcap or 0.0,
        query.stride(0),
        plan.block_tables.stride(0),
        num_kv_heads,
        plan.window,
        WINDOW=plan.window > 0,
        SOFTCAP=softcap is not None,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        # A float32 query of a cache that is not takes the tiles that were planned.
        **{**launch.options, "BLOCK_M": plan.tile_rows},
    )


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _MULTIPROCESSORS_OF_A_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count


SPECIALISATIONS = tuple(
    Specialisation(
        attention_kernel,
        "attention/float32" if one.is_float32 else f"attention/{one.block_d}",
        {**one.arguments, "tiles_ptr": "*i32:16"},
        hot=not one.is_float32,
        matrix=not one.is_float32,
        float8=one.is_float8,
        variant=one.variant,
    )
    for one in COMPILED
)
