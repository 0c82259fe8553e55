"""Plain torch: the definition of right for building a step's flat inputs from what the device knows of its rows.

A running sequence has a row for as long as it runs. A step names the rows that are in it, and the inputs follow from
their state, so that a step can be launched before the tokens of the one before have reached the host:

    rows          0: B   1: free   2: A   3: C            token history, tokens computed, block table of each
    idx_mapping   2, 0, 3, -1                             A: prefill, 3 tokens   B, C: decode   a padded sequence
    query_start   0, 3, 4, 5, 5
    token_ids     a5 a6 a7 | b9 | c4 | 0 0 0              the last three: padding, up to the size of a captured graph
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cache import NULL_BLOCK

PLACEHOLDER = -1
"""A token that was sampled while the host did not know it yet: `RowState.last_sampled` has it."""


class RowState(NamedTuple):
    """What the device knows of the running sequences; the rest of a row is whatever was there."""

    token_ids: Tensor  # [max_rows, max_len] int32, prompt and output, a PLACEHOLDER among them at the end
    num_computed: Tensor  # [max_rows] int32, tokens whose keys and values are in the cache
    block_tables: Tensor  # [max_rows, max_blocks] int32
    last_sampled: Tensor  # [max_rows] int32


class StepInputs(NamedTuple):
    """The inputs of a step, which `build_inputs` overwrites as a whole. Sizes are those of the step, padded or not.

    What is padded: sequences with index -1 have a length of 0 and the null block's table; tokens that no sequence has
    are token 0 at position 0, and slot -1 stores nothing of them.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    seq_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, num_columns] int32, padded with the null block


def allocate_inputs(num_tokens: int, num_seqs: int, num_columns: int, device: torch.device) -> StepInputs:
    """Return room for the inputs of a step; `num_columns` is how many blocks its longest sequence has at most."""
    token_ids, positions, slot_mapping = torch.empty(3, num_tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_seqs, dtype=torch.int32, device=device)
    block_tables = torch.empty(num_seqs, num_columns, dtype=torch.int32, device=device)
    return StepInputs(token_ids, positions, slot_mapping, seq_lens, block_tables)


def build_inputs(rows: RowState, idx_mapping: Tensor, query_start: Tensor, block_size: int, inputs: StepInputs) -> None:
    """Fill `inputs` with the next tokens of the rows in a step, sequence after sequence.

    idx_mapping `[num_seqs]` int32 is each sequence's row, distinct, or -1; query_start `[num_seqs + 1]` int32 is where
    its tokens start in the flat batch, and after the last of them where the padding does. A token without a block in
    its row's table stores nothing.
    """
    for tensor, padding in zip(inputs, (0, 0, -1, 0, NULL_BLOCK), strict=True):
        tensor.fill_(padding)
    starts = query_start.tolist()
    for sequence, row in enumerate(idx_mapping.tolist()):
        if row < 0:
            continue
        start, end = starts[sequence], starts[sequence + 1]
        first = int(rows.num_computed[row])
        seq_len = first + end - start
        positions = torch.arange(first, seq_len, device=query_start.device)
        token_ids, table = rows.token_ids[row, first:seq_len].long(), rows.block_tables[row]
        blocks = table[positions // block_size].long()
        inputs.token_ids[start:end] = token_ids.where(token_ids != PLACEHOLDER, rows.last_sampled[row].long())
        inputs.positions[start:end] = positions
        inputs.slot_mapping[start:end] = (blocks * block_size + positions % block_size).where(blocks != NULL_BLOCK, -1)
        inputs.seq_lens[sequence] = seq_len
        num_blocks = -(-seq_len // block_size)
        inputs.block_tables[sequence, :num_blocks] = table[:num_blocks]


def advance_rows(rows: RowState, idx_mapping: Tensor, query_start: Tensor, sample_of: Tensor, sampled: Tensor) -> None:
    """Count a step's tokens as computed, and append what was sampled, in place; padded sequences change nothing.

    sample_of `[num_seqs]` int32 is the place of a sequence's token in `sampled` `[num_samples]` int64, or -1 where
    nothing was sampled. A token beyond the end of the row's history is only its last sampled one.
    """
    lengths = query_start.diff().tolist()
    for row, length, place in zip(idx_mapping.tolist(), lengths, sample_of.tolist(), strict=True):
        if row < 0:
            continue
        rows.num_computed[row] += length
        if place < 0:
            continue
        rows.last_sampled[row] = sampled[place].int()
        if (position := int(rows.num_computed[row])) < rows.token_ids.shape[1]:
            rows.token_ids[row, position] = sampled[place].int()
