"""Attention of rows that are alone, as in decoding: the keys are cut into segments. See `kernels.triton.plan`.

A row's query heads that share a KV head are the rows of one tile, padded to 16, the least that tensor cores take; for a
group, the heads of several sequences. Programs are started for the items there are, or, where a CUDA graph fixes their
number, take the next item when they are done with one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache import LayerKV
from kernels.triton.launch import Specialisation, launch_for
from kernels.triton.plan import GROUP_ROWS, ITEM_WIDTH, SEGMENT, DecodePlan
from kernels.triton.tiles import COMPILED, LOWEST, Compiled, attend_tile, finish, head_row, merge

_LEAST_ROWS = 16
# Parts of one tensor, which begin wherever the parts before them end: no reason to compile a step's kernel anew.
_UNALIGNED = ["items_ptr", "count_ptr", "members_ptr"]


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_UNALIGNED)
def decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    items_ptr,
    count_ptr,
    members_ptr,
    sinks_ptr,
    out_ptr,
    sums_ptr,
    statistics_ptr,
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
    SEGMENT: tl.constexpr,
    ITEM_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend the segments of items, and write outputs or, for a merge, parts."""
    TILES: tl.constexpr = SEGMENT // BLOCK_N
    FLOAT8: tl.constexpr = key_scales_ptr is not None
    tile_rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    for index in range(tl.program_id(0), tl.load(count_ptr) * num_kv_heads, tl.num_programs(0)):
        kv_head = index % num_kv_heads
        item_ptr = items_ptr + index // num_kv_heads * ITEM_WIDTH
        table_ptr = block_tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
        member = tile_rows // GROUP
        is_row = member < tl.load(item_ptr + 2)
        member_ptr = members_ptr + (tl.load(item_ptr + 1) + member) * 2
        row = tl.load(member_ptr, mask=is_row, other=0).to(tl.int64)
        part = tl.load(member_ptr + 1, mask=is_row, other=-1).to(tl.int64)
        heads = kv_head * GROUP + tile_rows % GROUP
        is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (row * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
        query = tl.load(query_ptr + offsets, mask=is_number, other=0.0)
        position = tl.load(item_ptr + 3)
        positions = position + tl.zeros((BLOCK_M,), tl.int32)
        first = tl.load(item_ptr + 4) * TILES
        end = tl.minimum(tl.load(item_ptr + 5) * TILES, position // BLOCK_N + 1)
        if WINDOW:
            first = tl.maximum(first, (position - window + 1) // BLOCK_N)
        all_maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
        all_total = tl.zeros((BLOCK_M,), tl.float32)
        all_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        maximum, total, sums = all_maximum, all_total, all_sums
        for tile in range(first, end):
            maximum, total, sums = attend_tile(
                query,
                maximum,
                total,
                sums,
                tile * BLOCK_N,
                positions,
                position + 1,
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
                True,
                WINDOW,
                SOFTCAP,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_SIZE,
                BLOCK_N,
            )
            if (tile + 1) % TILES == 0:
                all_maximum, all_total, all_sums = merge(all_maximum, all_total, all_sums, maximum, total, sums)
                maximum = tl.full((BLOCK_M,), LOWEST, tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        # Neutral where the last segment was full.
        all_maximum, all_total, all_sums = merge(all_maximum, all_total, all_sums, maximum, total, sums)

        num_heads = num_kv_heads * GROUP
        is_part = is_number & (part >= 0)[:, None]
        of_part = part * num_heads + heads
        tl.store(sums_ptr + of_part[:, None] * HEAD_DIM + dims[None, :], all_sums, mask=is_part)
        tl.store(statistics_ptr + of_part * 2, all_maximum, mask=is_row & (part >= 0))
        tl.store(statistics_ptr + of_part * 2 + 1, all_total, mask=is_row & (part >= 0))
        out = finish(all_maximum, all_total, all_sums, sinks_ptr, heads, is_row, FLOAT8)
        places = (row * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_number & (part < 0)[:, None])


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "count_ptr"])
def merge_kernel(
    sums_ptr,
    statistics_ptr,
    rows_ptr,
    count_ptr,
    sinks_ptr,
    out_ptr,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Merge the parts of a row, for the heads of one KV head; a row of none becomes zeros."""
    index, kv_head = tl.program_id(0) // num_kv_heads, tl.program_id(0) % num_kv_heads
    if index < tl.load(count_ptr):
        row = tl.load(rows_ptr + index * 3).to(tl.int64)
        first_part = tl.load(rows_ptr + index * 3 + 1).to(tl.int64)
        num_parts = tl.load(rows_ptr + index * 3 + 2)
        of_group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        is_row = of_group < GROUP
        heads, num_heads = kv_head * GROUP + of_group, num_kv_heads * GROUP
        is_number = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        maximum = tl.full((BLOCK_G,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        sums = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for part in range(num_parts):
            of_part = (first_part + part) * num_heads + heads
            part_maximum = tl.load(statistics_ptr + of_part * 2, mask=is_row, other=LOWEST)
            part_total = tl.load(statistics_ptr + of_part * 2 + 1, mask=is_row, other=0.0)
            part_ptrs = sums_ptr + of_part[:, None] * HEAD_DIM + dims[None, :]
            part_sums = tl.load(part_ptrs, mask=is_number, other=0.0)
            maximum, total, sums = merge(maximum, total, sums, part_maximum, part_total, part_sums)
        out = finish(maximum, total, sums, sinks_ptr, heads, is_row, FLOAT8)
        places = (row * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_number)


def attend_rows(
    query: Tensor,
    out: Tensor,
    layer: LayerKV,
    block_tables: Tensor,
    plan: DecodePlan,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write to `out`, `[num_tokens, num_heads, head_dim]`, the rows of `plan` and no others."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = layer.key.shape[1:3]
    group, block_d = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    least_rows = max(_LEAST_ROWS, triton.next_power_of_2(group))
    is_float8, is_float32 = layer.key_scales is not None, query.dtype == torch.float32
    row = head_row("decode", head_dim, query.dtype)
    launch = launch_for(f"{row}/float8" if is_float8 and not is_float32 else row, query.device)
    counts = plan.counts.split(1)
    for items, count, block_m in ((plan.items, counts[0], least_rows), (plan.groups, counts[1], GROUP_ROWS)):
        programs = min(len(items) * num_kv_heads, plan.most_programs)
        if not programs:
            continue
        decode_kernel[(programs,)](
            query,
            layer.key,
            layer.value,
            layer.key_scales,
            layer.value_scales,
            block_tables,
            items,
            count,
            plan.members,
            sinks,
            out,
            plan.sums,
            plan.statistics,
            scale,
            softcap or 0.0,
            query.stride(0),
            block_tables.stride(0),
            num_kv_heads,
            window,
            WINDOW=window > 0,
            SOFTCAP=softcap is not None,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_SIZE=block_size,
            SEGMENT=SEGMENT,
            ITEM_WIDTH=ITEM_WIDTH,
            BLOCK_M=block_m,
            **launch.options,
        )
    if len(plan.rows):
        launch = launch_for("merge", query.device)
        merge_kernel[(len(plan.rows) * num_kv_heads,)](
            plan.sums,
            plan.statistics,
            plan.rows,
            counts[2],
            sinks,
            out,
            num_kv_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_G=triton.next_power_of_2(group),
            FLOAT8=is_float8,
            **launch.options,
        )


def _decode(one: Compiled, rows: int) -> Specialisation:
    """`rows` are those of a tile: of one sequence, or of a group."""
    row = "decode/float32" if one.is_float32 else f"decode/{one.block_d}{'/float8' * one.is_float8}"
    arguments = {
        **one.arguments,
        **dict.fromkeys(("sums_ptr", "statistics_ptr"), "*fp32:16"),
        **dict.fromkeys(("items_ptr", "count_ptr", "members_ptr"), "*i32"),
        "SEGMENT": SEGMENT,
        "ITEM_WIDTH": ITEM_WIDTH,
        "BLOCK_M": rows,
    }
    variant = f"{one.variant} rows={rows}"
    return Specialisation(decode_kernel, row, arguments, hot=not one.is_float32, float8=one.is_float8, variant=variant)


def _merge(head_dim: int, group: int) -> Specialisation:
    arguments = {
        **dict.fromkeys(("sums_ptr", "statistics_ptr"), "*fp32:16"),
        **dict.fromkeys(("rows_ptr", "count_ptr"), "*i32"),
        "sinks_ptr": "*bf16:16",
        "out_ptr": "*bf16:16",
        "num_kv_heads": "i32",
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_G": triton.next_power_of_2(group),
        "FLOAT8": False,
    }
    return Specialisation(merge_kernel, "merge", arguments, hot=True, variant=f"{head_dim} {group}:1")


SPECIALISATIONS = (
    # Nothing is shared in a window.
    *(
        _decode(one, rows)
        for one in COMPILED
        for rows in ((_LEAST_ROWS,) if one.window or one.is_float32 else (_LEAST_ROWS, GROUP_ROWS))
    ),
    _merge(64, 7),
    _merge(256, 2),
)
