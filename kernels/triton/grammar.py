"""Which tokens may follow, one bit a token: applied to logits."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Specialisation, launch_for


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """As `kernels.bitmask.apply_token_bitmask`; each row of `logits` is contiguous."""
    vocab_size = logits.shape[1]
    if len(rows) == 0:
        return
    launch = launch_for("token_bitmask", logits.device)
    grid = (len(rows), triton.cdiv(vocab_size, 32 * launch.meta["WORDS"]))
    token_bitmask_kernel[grid](
        logits,
        bitmask,
        rows,
        logits.stride(0),
        bitmask.stride(0),
        bitmask.shape[1],
        vocab_size,
        **launch.options,
    )


@triton.jit
def token_bitmask_kernel(
    logits_ptr, bitmask_ptr, rows_ptr, logits_stride, bitmask_stride, num_words, vocab_size, WORDS: tl.constexpr
):
    masked_row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask_ptr + masked_row * bitmask_stride + word, mask=word < num_words, other=0)
    bit = tl.arange(0, 32)
    ruled_out = ((bits[:, None] >> bit[None, :]) & 1) == 0
    token = word[:, None] * 32 + bit[None, :]
    ruled_out = ruled_out & (token < vocab_size)
    pointer = logits_ptr + tl.load(rows_ptr + masked_row).to(tl.int64) * logits_stride + token
    x = tl.load(pointer, mask=ruled_out, other=0.0)
    # What is NaN stays so: whoever samples from the row is to see it.
    tl.store(pointer, float("-inf"), mask=ruled_out & (x == x))


SPECIALISATIONS: tuple[Specialisation, ...] = (
    Specialisation(
        token_bitmask_kernel,
        "token_bitmask",
        {
            "logits_ptr": "*fp32:16",
            "bitmask_ptr": "*i32:16",
            "rows_ptr": "*i64:16",
            "logits_stride": "i32:16",
            "bitmask_stride": "i32",
            "num_words": "i32",
            "vocab_size": "i32:16",
        },
        hot=True,
    ),
)
