"""Penalties for tokens that a sequence has already, from counts that stay on the device."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_sampling import IN_PROMPT, Penalties
from kernels.triton.launch import Specialisation, launch_for

_OUTPUT_BITS = tl.constexpr(IN_PROMPT - 1)


def apply_penalties(logits: Tensor, counts: Tensor, penalties: Penalties) -> None:
    """As `kernels.reference_sampling.apply_penalties`; each row of `logits` is contiguous."""
    num_rows, vocab_size = len(penalties.rows), logits.shape[1]
    if num_rows == 0:
        return
    launch = launch_for("penalties", logits.device)
    grid = (num_rows, triton.cdiv(vocab_size, launch.meta["BLOCK"]))
    penalties_kernel[grid](logits, counts, *penalties, logits.stride(0), vocab_size, **launch.options)


@triton.jit
def penalties_kernel(
    logits_ptr,
    counts_ptr,
    rows_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    penalised = tl.program_id(0)
    slot = tl.load(slots_ptr + penalised).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.load(counts_ptr + slot * vocab_size + token, mask=token < vocab_size, other=0)
    occurs = known > 0
    in_output = known & _OUTPUT_BITS
    pointer = logits_ptr + tl.load(rows_ptr + penalised).to(tl.int64) * logits_stride + token
    x = tl.load(pointer, mask=occurs, other=0.0)
    repetition = tl.load(repetition_ptr + penalised)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    presence = tl.where(in_output > 0, tl.load(presence_ptr + penalised), 0.0)
    x -= tl.load(frequency_ptr + penalised) * in_output.to(tl.float32) + presence
    tl.store(pointer, x, mask=occurs)


SPECIALISATIONS: tuple[Specialisation, ...] = (
    Specialisation(
        penalties_kernel,
        "penalties",
        {
            "logits_ptr": "*fp32:16",
            "counts_ptr": "*i32:16",
            "rows_ptr": "*i64:16",
            "slots_ptr": "*i64:16",
            "repetition_ptr": "*fp32:16",
            "presence_ptr": "*fp32:16",
            "frequency_ptr": "*fp32:16",
            "logits_stride": "i32:16",
            "vocab_size": "i32:16",
        },
        hot=True,
    ),
)
