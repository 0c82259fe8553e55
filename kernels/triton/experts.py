"""A mixture of experts as two grouped products: one launch multiplies each expert's rows by that expert's matrix.

Rows are sorted by expert on the device, and a tile finds its expert there: nothing waits for the routing, and a
captured graph serves any. The grid has the most tiles that there can be; those beyond the last end at once.

A row's bits do not depend on the rows beside it: tiles of inputs are summed in one order whatever the tiles of rows,
and a token's experts in the order of their numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import torch_moe
from kernels.experts import StackedExperts
from kernels.reference import Expert
from kernels.triton.groups import max_tiles, rows_of_tile
from kernels.triton.launch import Specialisation, launch_for

# Rows of a tile, by row of the launch table.
_ROWS_OF_A_TILE = (16, 64, 128)


@triton.jit(do_not_specialize=["num_groups"])
def grouped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows_ptr,
    offsets_ptr,
    num_groups,
    out_features,
    in_features,
    GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write row i of `[num_rows, out_features]`: row `rows[i]` of x, or row i, by the weight of i's group.

    The weight is the left operand, as in `kernels.triton.w4a16`. The grid is (tiles of outputs, tiles of rows).
    """
    group, start, stop = rows_of_tile(offsets_ptr, num_groups, tl.program_id(1), GROUPS, BLOCK_M)
    if start >= stop:
        return
    rows = start + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < stop, outputs < out_features
    sources = rows if rows_ptr is None else tl.load(rows_ptr + rows, mask=is_row, other=0)
    places = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + sources.to(tl.int64)[:, None] * in_features + places[None, :]
    weight_rows = weight_ptr + (group.to(tl.int64) * out_features + outputs)[:, None] * in_features + places[None, :]

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, in_features, BLOCK_K):
        x_inside, weight_inside = is_row[:, None], is_output[:, None]
        if not EVEN_K:
            is_input = (places < in_features - k)[None, :]
            x_inside, weight_inside = x_inside & is_input, weight_inside & is_input
        x = tl.load(x_rows + k, mask=x_inside, other=0.0)
        weight = tl.load(weight_rows + k, mask=weight_inside, other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")

    out = tl.trans(total)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group.to(tl.int64) * out_features + outputs, mask=is_output, other=0.0)
        out += bias.to(tl.float32)[None, :]
    to = out_ptr + rows.to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def sum_experts_kernel(rows_ptr, places_ptr, shares_ptr, out_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Write `[num_tokens, size]`: of each token's rows, at `places`, the sum by their shares, in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + index).to(tl.int64)
        row = tl.load(rows_ptr + place * size + columns, mask=inside, other=0.0).to(tl.float32)
        total += row * tl.load(shares_ptr + token * TOP_K + index)
    tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


class _Routing(NamedTuple):
    """Where each token's rows are once rows are sorted by expert.

    tokens `[num_tokens * top_k]`, of which token a row is; offsets `[num_experts + 1]` int32, where each expert's rows
    start; places and shares `[num_tokens, top_k]`, each token's rows and weights by the numbers of their experts.
    """

    tokens: Tensor
    offsets: Tensor
    places: Tensor
    shares: Tensor


def _route(expert_ids: Tensor, weights: Tensor, num_experts: int) -> _Routing:
    """Sort rows by expert, those of one expert by token, without asking the device for anything."""
    ids, chosen = expert_ids.sort(dim=1)
    by_expert, order = ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return _Routing(
        tokens=order // ids.shape[1],
        offsets=torch.searchsorted(by_expert, experts, out_int32=True),
        places=places,
        shares=weights.gather(1, chosen),
    )


def mixture_of_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Sum each token's experts by their weights, as `kernels.reference.mixture_of_experts` defines it.

    x `[num_tokens, hidden_size]`, contiguous, of the experts' dtype. Only `StackedExperts` are multiplied in groups.
    Others are called one by one, which reads from the device how many rows each has, and no graph captures that.
    """
    if not isinstance(experts, StackedExperts):
        return torch_moe.mixture_of_experts(x, expert_ids, weights, experts)
    routing = _route(expert_ids, weights, len(experts))
    gate_up = _grouped_linear(x, experts.gate_up, experts.gate_up_bias, routing.offsets, routing.tokens)
    rows = experts.activate_and_mul(gate_up)
    rows = _grouped_linear(rows, experts.down, experts.down_bias, routing.offsets, None)
    out = torch.empty_like(x)
    launch = launch_for("sum_experts", x.device)
    grid = (len(x), triton.cdiv(x.shape[1], launch.meta["BLOCK"]))
    sum_experts_kernel[grid](
        rows, routing.places, routing.shares, out, x.shape[1], TOP_K=expert_ids.shape[1], **launch.options
    )
    return out


def _grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, rows: Tensor | None) -> Tensor:
    """Return `[num_rows, out_features]`, each row of x by the weight, `[out_features, in_features]`, of its group.

    Rows of x are those that `rows` lists, or all; they are those of group g from `offsets[g]` to `offsets[g + 1]`.
    """
    num_groups, out_features, in_features = weight.shape
    num_rows = len(x if rows is None else rows)
    launch = launch_for(_row_of_launches(num_rows / num_groups, x.dtype), x.device)
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    row_tiles = max_tiles(num_rows, num_groups, launch.meta["BLOCK_M"])
    grid = (triton.cdiv(out_features, launch.meta["BLOCK_N"]), row_tiles)
    grouped_kernel[grid](
        x,
        weight,
        bias,
        out,
        rows,
        offsets,
        num_groups,
        out_features,
        in_features,
        GROUPS=triton.next_power_of_2(num_groups),
        EVEN_K=in_features % launch.meta["BLOCK_K"] == 0,
        **launch.options,
    )
    return out


def _row_of_launches(rows_of_a_group: float, dtype: torch.dtype) -> str:
    """Return the row of the launch table for products of `dtype`; all of float32 share one."""
    if dtype == torch.float32:
        return "experts/float32"
    tile = next((rows for rows in _ROWS_OF_A_TILE if rows_of_a_group <= rows), _ROWS_OF_A_TILE[-1])
    return f"experts/{tile}"


def _grouped(row: str, dtype: str, groups: int, *, gathered: bool, bias: bool, even_k: bool) -> Specialisation:
    arguments = {
        "x_ptr": f"*{dtype}:16",
        "weight_ptr": f"*{dtype}:16",
        "bias_ptr": f"*{dtype}:16" if bias else None,
        "out_ptr": f"*{dtype}:16",
        "rows_ptr": "*i64:16" if gathered else None,
        "offsets_ptr": "*i32:16",
        "num_groups": "i32",
        "out_features": "i32:16",
        "in_features": "i32:16",
        "GROUPS": groups,
        "EVEN_K": even_k,
    }
    parts = (dtype, str(groups), "gathered" if gathered else "", "bias" if bias else "", "" if even_k else "odd K")
    variant = " ".join(filter(None, parts))
    is_fast = dtype != "fp32"
    return Specialisation(grouped_kernel, row, arguments, hot=is_fast, matrix=is_fast, variant=variant)


SPECIALISATIONS = (
    *(
        _grouped(f"experts/{tile}", dtype, groups, gathered=gathered, bias=bias, even_k=even_k)
        for tile in _ROWS_OF_A_TILE
        for dtype, groups, gathered, bias, even_k in (
            ("bf16", 128, True, False, True),
            ("bf16", 128, False, False, True),
            ("bf16", 32, True, True, False),
            ("fp16", 8, True, False, True),
        )
    ),
    _grouped("experts/float32", "fp32", 32, gathered=True, bias=True, even_k=False),
    *(
        Specialisation(
            sum_experts_kernel,
            "sum_experts",
            {
                "rows_ptr": f"*{dtype}:16",
                "places_ptr": "*i64:16",
                "shares_ptr": "*fp32:16",
                "out_ptr": f"*{dtype}:16",
                "size": "i32:16",
                "TOP_K": top_k,
            },
            hot=True,
            variant=f"{dtype} top {top_k}",
        )
        for dtype in ("bf16", "fp16")
        for top_k in (4, 8)
    ),
)
