"""Products of few rows: the inputs are cut into splits, so that there are programs for the whole card.

The cut depends on the weight's shape alone. However many rows there are, each output is the sum of the same splits in
the same order, whether they are summed by one program or by the kernel here: a row's bits do not depend on the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Specialisation, launch_for

# Two for each multiprocessor of an H100 or H200; a constant, so that one model has one cut on every card.
_PROGRAMS = 264
_OUTPUTS_OF_A_PROGRAM = 128
# Less than this, and a program's pipeline is hardly full before it ends.
_TILES_OF_A_SPLIT = 4


def num_splits(out_features: int, k_tiles: int) -> int:
    """Return into how many splits `k_tiles` tiles of inputs are cut: a power of two."""
    programs = -(-out_features // _OUTPUTS_OF_A_PROGRAM)
    splits = 1
    while programs * splits < _PROGRAMS and k_tiles >= 2 * splits * _TILES_OF_A_SPLIT:
        splits *= 2
    return splits


def fills_card(out_features: int, row_tiles: int) -> bool:
    """Return whether there are programs enough when each sums all splits itself."""
    return -(-out_features // _OUTPUTS_OF_A_PROGRAM) * row_tiles >= _PROGRAMS


@triton.jit(do_not_specialize=["size"])
def sum_splits_kernel(partials_ptr, bias_ptr, out_ptr, size, out_features, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum `[SPLITS, size]` float32 into `[size]`, in order; size is rows of `out_features`, to which the bias goes."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + split * size + places, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + places % out_features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_splits(partials: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write to `out` `[num_tokens, out_features]` the sum of `partials` `[splits, num_tokens, out_features]` float32.

    The sum is float32, split by split in their order and then `bias` `[out_features]`, and rounded once.
    """
    launch = launch_for("sum_splits", out.device)
    grid = (triton.cdiv(out.numel(), launch.meta["BLOCK"]),)
    sum_splits_kernel[grid](partials, bias, out, out.numel(), out.shape[1], SPLITS=partials.shape[0], **launch.options)


def empty_partials(x: Tensor, splits: int, out_features: int) -> Tensor:
    """Return room for what each split adds to each output, `[splits, num_tokens, out_features]`."""
    return torch.empty((splits, x.shape[0], out_features), dtype=torch.float32, device=x.device)


SPECIALISATIONS = tuple(
    Specialisation(
        sum_splits_kernel,
        "sum_splits",
        {
            "partials_ptr": "*fp32:16",
            "bias_ptr": bias,
            "out_ptr": f"*{dtype}:16",
            "size": "i32",
            "out_features": "i32:16",
            "SPLITS": 8,
        },
        hot=True,
        variant=dtype if bias is None else f"{dtype} bias",
    )
    for dtype in ("bf16", "fp16")
    for bias in (None, f"*{dtype}:16")
)
