"""A step's inputs from the state of its rows, and what was sampled back into it: see `kernels.reference_inputs`."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_inputs import PLACEHOLDER, InputTensors, RowState, StepRows
from kernels.triton.launch import Specialisation, launch_for

_PLACEHOLDER = tl.constexpr(PLACEHOLDER)


def build_inputs(rows: RowState, step: StepRows, block_size: int, inputs: InputTensors) -> None:
    """As `kernels.reference_inputs.build_inputs`."""
    padded_seqs, num_columns = inputs.block_tables.shape
    build_inputs_kernel[(padded_seqs + 1,)](
        *rows,
        *step,
        *inputs,
        len(step.idx_mapping),
        padded_seqs,
        len(inputs.token_ids),
        rows.block_tables.shape[1],
        num_columns,
        inputs.block_tables.stride(0),
        block_size,
        **launch_for("build_inputs", step.idx_mapping.device).options,
    )


def advance_rows(rows: RowState, idx_mapping: Tensor, draws: Tensor, sampled: Tensor) -> None:
    """As `kernels.reference_inputs.advance_rows`."""
    num_rows = len(idx_mapping)
    if num_rows == 0:
        return
    launch = launch_for("advance_rows", idx_mapping.device)
    grid = (triton.cdiv(num_rows, launch.meta["BLOCK"]),)
    advance_rows_kernel[grid](rows.last_sampled, idx_mapping, draws, sampled, num_rows, **launch.options)


@triton.jit(do_not_specialize=["num_seqs", "padded_seqs", "padded_tokens", "num_columns", "table_stride"])
def build_inputs_kernel(
    row_tables_ptr,
    last_sampled_ptr,
    idx_mapping_ptr,
    step_query_start_ptr,
    num_computed_ptr,
    step_token_ids_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_seqs,
    padded_seqs,
    padded_tokens,
    max_blocks,
    num_columns,
    table_stride,
    block_size,
    BLOCK: tl.constexpr,
):
    """One program for each sequence, padded ones too, and one more for the tokens that no sequence has."""
    sequence = tl.program_id(0)
    is_known = sequence < num_seqs
    is_padding = sequence == padded_seqs
    num_tokens = tl.load(step_query_start_ptr + num_seqs)
    start = tl.load(step_query_start_ptr + sequence, mask=is_known, other=num_tokens)
    end = tl.load(step_query_start_ptr + sequence + 1, mask=is_known, other=num_tokens)
    end = tl.where(is_padding, padded_tokens, end)
    row = tl.load(idx_mapping_ptr + sequence, mask=is_known, other=0).to(tl.int64)
    first = tl.load(num_computed_ptr + sequence, mask=is_known, other=0)
    last_sampled = tl.load(last_sampled_ptr + row)
    for offset in range(0, end - start, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        inside = token < end - start
        known = inside & is_known
        position = tl.where(known, first + token, 0)
        token_id = tl.load(step_token_ids_ptr + start + token, mask=known, other=0)
        block = tl.load(row_tables_ptr + row * max_blocks + position // block_size, mask=known, other=0)
        slot = tl.where(block != 0, block.to(tl.int64) * block_size + position % block_size, -1)
        tl.store(token_ids_ptr + start + token, tl.where(token_id == _PLACEHOLDER, last_sampled, token_id), mask=inside)
        tl.store(positions_ptr + start + token, position, mask=inside)
        tl.store(slot_mapping_ptr + start + token, slot, mask=inside)
    seq_len = tl.where(is_known, first + end - start, 0)
    tl.store(query_start_ptr + sequence, start)
    tl.store(seq_lens_ptr + sequence, seq_len, mask=sequence < padded_seqs)
    num_used = tl.cdiv(seq_len, block_size)
    for offset in range(0, num_columns, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        block = tl.load(row_tables_ptr + row * max_blocks + column, mask=column < num_used, other=0)
        inside = (sequence < padded_seqs) & (column < num_columns)
        tl.store(block_tables_ptr + sequence.to(tl.int64) * table_stride + column, block, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def advance_rows_kernel(last_sampled_ptr, idx_mapping_ptr, draws_ptr, sampled_ptr, num_rows, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows
    row = tl.load(idx_mapping_ptr + index, mask=inside, other=0)
    draw = tl.load(draws_ptr + index, mask=inside, other=0)
    token_id = tl.load(sampled_ptr + draw, mask=inside, other=0).to(tl.int32)
    tl.store(last_sampled_ptr + row, token_id, mask=inside)


SPECIALISATIONS: tuple[Specialisation, ...] = (
    Specialisation(
        build_inputs_kernel,
        "build_inputs",
        {
            "row_tables_ptr": "*i32:16",
            "last_sampled_ptr": "*i32:16",
            "idx_mapping_ptr": "*i32:16",
            "step_query_start_ptr": "*i32:16",
            "num_computed_ptr": "*i32:16",
            "step_token_ids_ptr": "*i32:16",
            "token_ids_ptr": "*i64:16",
            "positions_ptr": "*i64:16",
            "slot_mapping_ptr": "*i64:16",
            "query_start_ptr": "*i32:16",
            "seq_lens_ptr": "*i32:16",
            "block_tables_ptr": "*i32:16",
            "num_seqs": "i32",
            "padded_seqs": "i32",
            "padded_tokens": "i32",
            "max_blocks": "i32",
            "num_columns": "i32",
            "table_stride": "i32",
            "block_size": "i32:16",
        },
        hot=True,
    ),
    Specialisation(
        advance_rows_kernel,
        "advance_rows",
        {
            "last_sampled_ptr": "*i32:16",
            "idx_mapping_ptr": "*i32:16",
            "draws_ptr": "*i32:16",
            "sampled_ptr": "*i64:16",
            "num_rows": "i32",
        },
        hot=True,
    ),
)
