"""A step's inputs from the state of its rows, and what was sampled back into it: see `kernels.reference_inputs`.

All that varies between steps is on the device, so that a captured graph replays both with other rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_inputs import PLACEHOLDER, RowState, StepInputs
from kernels.triton.launch import Specialisation, launch_for

_PLACEHOLDER = tl.constexpr(PLACEHOLDER)


def build_inputs(rows: RowState, idx_mapping: Tensor, query_start: Tensor, block_size: int, inputs: StepInputs) -> None:
    """As `kernels.reference_inputs.build_inputs`."""
    num_seqs = len(idx_mapping)
    build_inputs_kernel[(num_seqs + 1,)](
        *rows,
        idx_mapping,
        query_start,
        *inputs,
        num_seqs,
        len(inputs.token_ids),
        rows.token_ids.shape[1],
        rows.block_tables.shape[1],
        inputs.block_tables.shape[1],
        block_size,
        **launch_for("build_inputs", idx_mapping.device).options,
    )


def advance_rows(rows: RowState, idx_mapping: Tensor, query_start: Tensor, sample_of: Tensor, sampled: Tensor) -> None:
    """As `kernels.reference_inputs.advance_rows`."""
    num_seqs = len(idx_mapping)
    launch = launch_for("advance_rows", idx_mapping.device)
    advance_rows_kernel[(triton.cdiv(num_seqs, launch.meta["BLOCK"]),)](
        rows.token_ids,
        rows.num_computed,
        rows.last_sampled,
        idx_mapping,
        query_start,
        sample_of,
        sampled,
        num_seqs,
        rows.token_ids.shape[1],
        **launch.options,
    )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def build_inputs_kernel(
    history_ptr,
    num_computed_ptr,
    row_tables_ptr,
    last_sampled_ptr,
    idx_mapping_ptr,
    query_start_ptr,
    token_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_seqs,
    num_tokens,
    max_len,
    max_blocks,
    num_columns,
    block_size,
    BLOCK: tl.constexpr,
):
    """One program for each sequence, and one more for the tokens that no sequence has."""
    sequence = tl.program_id(0)
    is_sequence = sequence < num_seqs
    row = tl.load(idx_mapping_ptr + sequence, mask=is_sequence, other=-1).to(tl.int64)
    is_row = row >= 0
    start = tl.load(query_start_ptr + sequence)
    end = tl.load(query_start_ptr + sequence + 1, mask=is_sequence, other=num_tokens)
    first = tl.load(num_computed_ptr + row, mask=is_row, other=0)
    last_sampled = tl.load(last_sampled_ptr + row, mask=is_row, other=0)
    for offset in range(0, end - start, BLOCK):
        token = offset + tl.arange(0, BLOCK)
        inside = token < end - start
        known = inside & is_row
        position = tl.where(known, first + token, 0)
        token_id = tl.load(history_ptr + row * max_len + position, mask=known & (position < max_len), other=0)
        column = position // block_size
        block = tl.load(row_tables_ptr + row * max_blocks + column, mask=known & (column < max_blocks), other=0)
        slot = tl.where(block != 0, block.to(tl.int64) * block_size + position % block_size, -1)
        tl.store(token_ids_ptr + start + token, tl.where(token_id == _PLACEHOLDER, last_sampled, token_id), mask=inside)
        tl.store(positions_ptr + start + token, position, mask=inside)
        tl.store(slot_mapping_ptr + start + token, slot, mask=inside)
    seq_len = tl.where(is_row, first + end - start, 0)
    tl.store(seq_lens_ptr + sequence, seq_len, mask=is_sequence)
    num_used = tl.cdiv(seq_len, block_size)
    for offset in range(0, num_columns, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        block = tl.load(row_tables_ptr + row * max_blocks + column, mask=column < num_used, other=0)
        inside = is_sequence & (column < num_columns)
        tl.store(block_tables_ptr + sequence.to(tl.int64) * num_columns + column, block, mask=inside)


@triton.jit(do_not_specialize=["num_seqs"])
def advance_rows_kernel(
    history_ptr,
    num_computed_ptr,
    last_sampled_ptr,
    idx_mapping_ptr,
    query_start_ptr,
    sample_of_ptr,
    sampled_ptr,
    num_seqs,
    max_len,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < num_seqs
    row = tl.load(idx_mapping_ptr + sequence, mask=inside, other=-1).to(tl.int64)
    is_row = row >= 0
    start = tl.load(query_start_ptr + sequence, mask=is_row, other=0)
    end = tl.load(query_start_ptr + sequence + 1, mask=is_row, other=0)
    num_computed = tl.load(num_computed_ptr + row, mask=is_row, other=0) + end - start
    tl.store(num_computed_ptr + row, num_computed, mask=is_row)
    place = tl.load(sample_of_ptr + sequence, mask=is_row, other=-1)
    has_sample = place >= 0
    token_id = tl.load(sampled_ptr + place, mask=has_sample, other=0).to(tl.int32)
    tl.store(last_sampled_ptr + row, token_id, mask=has_sample)
    tl.store(history_ptr + row * max_len + num_computed, token_id, mask=has_sample & (num_computed < max_len))


SPECIALISATIONS: tuple[Specialisation, ...] = (
    Specialisation(
        build_inputs_kernel,
        "build_inputs",
        {
            "history_ptr": "*i32:16",
            "num_computed_ptr": "*i32:16",
            "row_tables_ptr": "*i32:16",
            "last_sampled_ptr": "*i32:16",
            "idx_mapping_ptr": "*i32:16",
            "query_start_ptr": "*i32:16",
            "token_ids_ptr": "*i64:16",
            "positions_ptr": "*i64:16",
            "slot_mapping_ptr": "*i64:16",
            "seq_lens_ptr": "*i32:16",
            "block_tables_ptr": "*i32:16",
            "num_seqs": "i32",
            "num_tokens": "i32",
            "max_len": "i32:16",
            "max_blocks": "i32:16",
            "num_columns": "i32:16",
            "block_size": "i32:16",
        },
        hot=True,
    ),
    Specialisation(
        advance_rows_kernel,
        "advance_rows",
        {
            "history_ptr": "*i32:16",
            "num_computed_ptr": "*i32:16",
            "last_sampled_ptr": "*i32:16",
            "idx_mapping_ptr": "*i32:16",
            "query_start_ptr": "*i32:16",
            "sample_of_ptr": "*i32:16",
            "sampled_ptr": "*i64:16",
            "num_seqs": "i32",
            "max_len": "i32:16",
        },
        hot=True,
    ),
)
