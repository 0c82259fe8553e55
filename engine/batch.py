"""From a plan to the flat tensors of one step.

rows       A: prefill, 3 tokens   B: decode   C: decode
token_ids  a5 a6 a7               b9          c4            one entry a token, row after row
positions  5  6  7                9           4
query_start  0 ──────────────────► 3 ────────► 4 ────────► 5
logits of          a7              b9          c4           the last token of each row that samples
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.scheduler import PlanRow, StepPlan
from kernels.ops import AttentionBatch


class SamplingBatch(NamedTuple):
    """What the sampler needs to know of the R rows that sample. The lists stay on the host, where branches are taken.

    Attributes:
        temperature, top_k, top_p, min_p: One number a row, as in `SamplingParams`; a top_k that is off is 0.
        seeds, positions: Int64. Position t of a row is the index, in prompt and output together, of the token sampled.
        banned: Token ids that a row must not sample, for the rows that have any.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    seeds: list[int]
    positions: list[int]
    banned: dict[int, list[int]]


class StepBatch(NamedTuple):
    """One step on the device. `logits_rows` `[R]` int64 are the places, in the flat batch, whose logits are wanted."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    logits_rows: Tensor
    sampling: SamplingBatch


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> StepBatch:
    """Lay out `plan` for the decoder; reads the requests, changes nothing."""
    starts = np.array([row.start for row in plan.rows], dtype=np.int64)
    lengths = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
    query_start = np.zeros(len(plan.rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    block_tables = _block_tables(plan.rows)

    row_of_token = np.repeat(np.arange(len(plan.rows)), lengths)
    positions = np.arange(plan.num_tokens) + np.repeat(starts - query_start[:-1], lengths)
    slots = block_tables[row_of_token, positions // block_size] * np.int64(block_size) + positions % block_size
    token_ids = np.fromiter(
        (token for row in plan.rows for token in row.request.token_ids[row.start : row.start + row.num_tokens]),
        dtype=np.int64,
        count=plan.num_tokens,
    )
    context_lengths = starts + lengths
    samples = np.array([row.samples for row in plan.rows], dtype=bool)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return StepBatch(
        token_ids=on_device(token_ids),
        positions=on_device(positions),
        attention=AttentionBatch(
            query_start=on_device(query_start.astype(np.int32)),
            seq_lens=on_device(context_lengths.astype(np.int32)),
            block_tables=on_device(block_tables),
            slot_mapping=on_device(slots),
            query_lens=tuple(lengths.tolist()),
            context_lens=tuple(context_lengths.tolist()),
        ),
        logits_rows=on_device(query_start[1:][samples] - 1),
        sampling=_sampling_batch([row for row in plan.rows if row.samples]),
    )


def _block_tables(rows: tuple[PlanRow, ...]) -> np.ndarray:
    """The rows' block tables, `[num_rows, longest]` int32, padded with the null block."""
    tables = np.zeros((len(rows), max(len(row.request.block_ids) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.request.block_ids)] = row.request.block_ids
    return tables


def _sampling_batch(rows: list[PlanRow]) -> SamplingBatch:
    requests = [row.request for row in rows]
    params = [request.params for request in requests]
    banned = ((index, request.banned_token_ids) for index, request in enumerate(requests))
    return SamplingBatch(
        temperature=[p.temperature for p in params],
        top_k=[max(p.top_k, 0) for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seeds=[request.seed for request in requests],
        positions=[request.num_tokens for request in requests],
        banned={index: sorted(token_ids) for index, token_ids in banned if token_ids},
    )
