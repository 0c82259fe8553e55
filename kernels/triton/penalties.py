"""Penalties for tokens that a sequence has already, from counts that stay on the device."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_sampling import Penalties, PenaltyState
from kernels.triton.launch import Specialisation, launch_for


def count_tokens(
    state: PenaltyState, slots: Tensor, histories: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, prompts: Tensor
) -> None:
    """As `kernels.reference_sampling.count_tokens`."""
    if len(slots) == 0:
        return
    count_tokens_kernel[(len(slots),)](
        *state,
        slots,
        histories,
        rows,
        starts,
        ends,
        prompts,
        state.output_counts.shape[1],
        state.in_prompt.shape[1],
        histories.shape[1],
        **launch_for("count_tokens", slots.device).options,
    )


def apply_penalties(logits: Tensor, state: PenaltyState, penalties: Penalties) -> None:
    """As `kernels.reference_sampling.apply_penalties`; each row of `logits` is contiguous."""
    num_rows, vocab_size = len(penalties.rows), logits.shape[1]
    if num_rows == 0:
        return
    launch = launch_for("penalties", logits.device)
    grid = (num_rows, triton.cdiv(vocab_size, 32 * launch.meta["WORDS"]))
    penalties_kernel[grid](
        logits, *state, *penalties, logits.stride(0), vocab_size, state.in_prompt.shape[1], **launch.options
    )


@triton.jit
def count_tokens_kernel(
    output_counts_ptr,
    in_prompt_ptr,
    slots_ptr,
    histories_ptr,
    rows_ptr,
    starts_ptr,
    ends_ptr,
    prompts_ptr,
    vocab_size,
    num_words,
    max_len,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot, row = tl.load(slots_ptr + sequence).to(tl.int64), tl.load(rows_ptr + sequence).to(tl.int64)
    start, end, prompt = tl.load(starts_ptr + sequence), tl.load(ends_ptr + sequence), tl.load(prompts_ptr + sequence)
    for offset in range(start, end, BLOCK):
        position = offset + tl.arange(0, BLOCK)
        token = tl.load(histories_ptr + row * max_len + position, mask=position < end, other=-1)
        in_prompt = (token >= 0) & (position < prompt)
        in_output = (token >= 0) & (position >= prompt)
        bit = (tl.full((BLOCK,), 1, tl.uint32) << (token % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
        tl.atomic_or(in_prompt_ptr + slot * num_words + token // 32, bit, mask=in_prompt)
        tl.atomic_add(output_counts_ptr + slot * vocab_size + token, 1, mask=in_output)


@triton.jit
def penalties_kernel(
    logits_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    rows_ptr,
    slots_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    logits_stride,
    vocab_size,
    num_words,
    WORDS: tl.constexpr,
):
    penalised = tl.program_id(0)
    slot = tl.load(slots_ptr + penalised).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(in_prompt_ptr + slot * num_words + word, mask=word < num_words, other=0)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    count = tl.load(output_counts_ptr + slot * vocab_size + token, mask=token < vocab_size, other=0)
    occurs = (token < vocab_size) & ((((bits[:, None] >> bit[None, :]) & 1) == 1) | (count > 0))
    pointer = logits_ptr + tl.load(rows_ptr + penalised).to(tl.int64) * logits_stride + token
    x = tl.load(pointer, mask=occurs, other=0.0)
    repetition = tl.load(repetition_ptr + penalised)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    presence = tl.where(count > 0, tl.load(presence_ptr + penalised), 0.0)
    x -= tl.load(frequency_ptr + penalised) * count.to(tl.float32) + presence
    tl.store(pointer, x, mask=occurs)


SPECIALISATIONS: tuple[Specialisation, ...] = (
    Specialisation(
        count_tokens_kernel,
        "count_tokens",
        {
            "output_counts_ptr": "*i32:16",
            "in_prompt_ptr": "*i32:16",
            "slots_ptr": "*i64:16",
            "histories_ptr": "*i32:16",
            "rows_ptr": "*i64:16",
            "starts_ptr": "*i64:16",
            "ends_ptr": "*i64:16",
            "prompts_ptr": "*i64:16",
            "vocab_size": "i32:16",
            "num_words": "i32",
            "max_len": "i32:16",
        },
        hot=True,
    ),
    Specialisation(
        penalties_kernel,
        "penalties",
        {
            "logits_ptr": "*fp32:16",
            "output_counts_ptr": "*i32:16",
            "in_prompt_ptr": "*i32:16",
            "rows_ptr": "*i64:16",
            "slots_ptr": "*i64:16",
            "repetition_ptr": "*fp32:16",
            "presence_ptr": "*fp32:16",
            "frequency_ptr": "*fp32:16",
            "logits_stride": "i32:16",
            "vocab_size": "i32:16",
            "num_words": "i32",
        },
        hot=True,
    ),
)
