"""Steps as attention sees them, laid out from what each sequence contributes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.cache import AttentionBatch


class Chunk(NamedTuple):
    """What one sequence contributes to a step: tokens `start` to `start + num_tokens`, in its blocks."""

    blocks: tuple[int, ...]
    start: int
    num_tokens: int


def flat_batch(chunks: Sequence[Chunk], block_size: int) -> AttentionBatch:
    """Lay out one step in which each chunk computes `num_tokens` positions of its sequence, from `start` on."""
    longest = max(len(chunk.blocks) for chunk in chunks)
    slots = [
        chunk.blocks[position // block_size] * block_size + position % block_size
        for chunk in chunks
        for position in range(chunk.start, chunk.start + chunk.num_tokens)
    ]
    lengths = [chunk.num_tokens for chunk in chunks]
    contexts = [chunk.start + chunk.num_tokens for chunk in chunks]
    return AttentionBatch(
        query_start=torch.tensor([0, *lengths]).cumsum(0).int(),
        seq_lens=torch.tensor(contexts).int(),
        block_tables=torch.tensor([[*chunk.blocks, *[0] * (longest - len(chunk.blocks))] for chunk in chunks]).int(),
        slot_mapping=torch.tensor(slots),
        query_lens=tuple(lengths),
        context_lens=tuple(contexts),
    )
