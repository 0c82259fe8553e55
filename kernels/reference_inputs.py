"""Plain torch: the definition of right for building a step's flat inputs from what the device knows of its rows.

A running sequence has a row for as long as it runs. A step names the rows that are in it, and the tokens that the host
knows of; those that were sampled in the step before are on the device, so that a step can be launched before they have
reached the host:

    rows          0: B   1: free   2: A   3: C            block table and last sampled token of each
    idx_mapping   2, 0, 3                                 A: prefill, 3 tokens   B, C: decode
    query_start   0, 3, 4, 5
    num_computed  4, 9, 6
    token_ids     a4 a5 a6 | ? | c6                       b9 is on its way

    token_ids     a4 a5 a6 | b9 | c6 | 0 0 0              the last three: padding, up to the size of a captured graph

Nothing here waits for a GPU: sizes are those of the tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cache import NULL_BLOCK, AttentionBatch

PLACEHOLDER = -1
"""A token that was sampled while the host did not know it yet: `RowState.last_sampled` has it."""


class RowState(NamedTuple):
    """What the device knows of the running sequences; the rest of a row is whatever was there."""

    block_tables: Tensor  # [max_rows, max_blocks] int32
    last_sampled: Tensor  # [max_rows] int32


class StepRows(NamedTuple):
    """What the host says of the sequences in a step."""

    idx_mapping: Tensor  # [num_seqs] int32, the row of each, distinct
    query_start: Tensor  # [num_seqs + 1] int32, where its tokens start in the flat batch
    num_computed: Tensor  # [num_seqs] int32, its tokens whose keys and values are in the cache
    token_ids: Tensor  # [num_tokens] int32, those that follow, with a PLACEHOLDER for the one sampled last


class InputTensors(NamedTuple):
    """The inputs of a step, which `build_inputs` overwrites as a whole. Sizes are those of the step, or larger.

    What is beyond the step's is padding: sequences without tokens, of length 0 and with the null block's table, and
    tokens that no sequence has, which are token 0 at position 0, and slot -1 stores nothing of them.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    query_start: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, num_columns] int32, padded with the null block; rows may be further apart

    def attention(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        host_block_tables: np.ndarray | None = None,
    ) -> AttentionBatch:
        """The same for attention, which wants to know some of it on the host."""
        return AttentionBatch(
            self.query_start,
            self.seq_lens,
            self.block_tables,
            self.slot_mapping,
            tuple(query_lens),
            tuple(context_lens),
            host_block_tables,
        )


def allocate_inputs(num_tokens: int, num_seqs: int, num_columns: int, device: torch.device) -> InputTensors:
    """Return room for the inputs of a step; `num_columns` is how many blocks its longest sequence has at most."""
    # One by one, so that each begins at a multiple of what is read at once.
    token_ids, positions, slot_mapping = (torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3))
    query_start = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
    seq_lens = torch.empty(num_seqs, dtype=torch.int32, device=device)
    block_tables = torch.empty(num_seqs, num_columns, dtype=torch.int32, device=device)
    return InputTensors(token_ids, positions, slot_mapping, query_start, seq_lens, block_tables)


def fill_with_padding(inputs: InputTensors, num_tokens: int = 0) -> None:
    """Make padding of all of it, behind so many tokens of sequences."""
    for tensor, padding in zip(inputs, (0, 0, -1, num_tokens, 0, NULL_BLOCK), strict=True):
        tensor.fill_(padding)


def build_inputs(rows: RowState, step: StepRows, block_size: int, inputs: InputTensors) -> None:
    """Fill `inputs` with a step of these rows, sequence after sequence; a token in the null block stores nothing."""
    num_tokens, num_seqs, num_columns = len(step.token_ids), len(step.idx_mapping), inputs.block_tables.shape[1]
    fill_with_padding(inputs, num_tokens)
    device = step.idx_mapping.device
    lengths = step.query_start.diff()
    sequence = torch.repeat_interleave(torch.arange(num_seqs, device=device), lengths, output_size=num_tokens)
    row = step.idx_mapping.long()[sequence]
    positions = torch.arange(num_tokens, device=device) + (step.num_computed - step.query_start[:-1])[sequence]
    blocks = rows.block_tables[row, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    inputs.token_ids[:num_tokens] = step.token_ids.where(step.token_ids != PLACEHOLDER, rows.last_sampled[row])
    inputs.positions[:num_tokens] = positions
    inputs.slot_mapping[:num_tokens] = slots.where(blocks != NULL_BLOCK, -1)
    inputs.query_start[: num_seqs + 1] = step.query_start
    inputs.seq_lens[:num_seqs] = step.num_computed + lengths
    tables = rows.block_tables[step.idx_mapping.long(), :num_columns]
    first_positions = torch.arange(num_columns, device=device) * block_size
    is_used = first_positions < inputs.seq_lens[:num_seqs].unsqueeze(1)
    inputs.block_tables[:num_seqs] = tables.where(is_used, NULL_BLOCK)


def advance_rows(rows: RowState, idx_mapping: Tensor, draws: Tensor, sampled: Tensor) -> None:
    """Note, in place, what was sampled for some rows: for the distinct rows `idx_mapping`, `[n]` int32, the tokens at
    places `draws`, `[n]` int32, of `sampled`, `[num_sampled]` int64.
    """
    rows.last_sampled[idx_mapping.long()] = sampled[draws.long()].int()
