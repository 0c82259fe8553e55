"""From a plan to the flat arrays of one step, on the host; `engine.inputs` brings them to the device.

rows       A: prefill, 3 tokens   B: decode   C: decode
token_ids  a5 a6 a7               b9          c4            one entry a token, row after row
positions  5  6  7                9           4
query_start  0 ──────────────────► 3 ────────► 4 ────────► 5
logits of          a7              b9          c4           the last token of each row that samples, once a sample
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.adapter_slots import slots_of_tokens
from engine.device import Device
from engine.plan import PlanRow, StepPlan
from engine.sampling.penalties import PenaltyRows
from engine.sampling.seeds import choice_seed
from engine.sampling.token_rules import LogitEdits, logit_edits
from engine.structured.grammar import GrammarMask
from kernels.ops import AttentionBatch


class SamplingBatch(NamedTuple):
    """What the sampler needs to know of the R rows that sample. The lists stay on the host, where branches are taken.

    Attributes:
        temperature, top_k, top_p, min_p: One number a row, as in `SamplingParams`; a top_k that is off is 0.
        seeds, positions: Int64. Position t of a row is the index, in prompt and output together, of the token sampled.
        grammar: What may follow, in the rows with structured output; None if there are none.
        edits: What requests say of single tokens; None if none of them says anything.
        num_logprobs: For the rows whose log-probabilities are wanted: how many of the likeliest beside the token's own.
        num_candidates: For the rows of beam search: how many of the likeliest tokens are wanted.
    """

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    seeds: list[int]
    positions: list[int]
    grammar: GrammarMask | None = None
    edits: LogitEdits | None = None
    num_logprobs: Mapping[int, int] = MappingProxyType({})
    num_candidates: Mapping[int, int] = MappingProxyType({})


class StepInputs(NamedTuple):
    """What the decoder computes, on the device: token ids and positions are `[num_tokens]` int64.

    adapter_slots: `[num_tokens]` int64, the slots of the tokens' adapters, -1 for none; None if no token has one.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    adapter_slots: Tensor | None = None


class StepArrays(NamedTuple):
    """One step on the host: `StepInputs`, with its `AttentionBatch`, and the places of the `[R]` logits wanted."""

    token_ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    logits_rows: np.ndarray
    adapter_slots: np.ndarray | None = None


def lay_out(plan: StepPlan, block_size: int) -> StepArrays:
    """Lay out `plan` for the decoder; reads the requests, changes nothing."""
    starts = np.array([row.start for row in plan.rows], dtype=np.int64)
    lengths = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
    query_start = np.zeros(len(plan.rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start[1:])
    block_tables = _block_tables(plan.rows)

    row_of_token = np.repeat(np.arange(len(plan.rows)), lengths)
    positions = np.arange(plan.num_tokens) + np.repeat(starts - query_start[:-1], lengths)
    slots = block_tables[row_of_token, positions // block_size] * np.int64(block_size) + positions % block_size
    context_lengths = starts + lengths
    return StepArrays(
        token_ids=tokens_of(plan, np.int64),
        positions=positions,
        query_start=query_start.astype(np.int32),
        seq_lens=context_lengths.astype(np.int32),
        block_tables=block_tables,
        slot_mapping=slots,
        query_lens=tuple(lengths.tolist()),
        context_lens=tuple(context_lengths.tolist()),
        logits_rows=np.repeat(query_start[1:] - 1, [row.num_samples for row in plan.rows]),
        adapter_slots=slots_of_tokens(plan.rows),
    )


def tokens_of(plan: StepPlan, dtype: type[np.integer]) -> np.ndarray:
    """The tokens of a step, `[num_tokens]`, with placeholders for those that are on their way to the host."""
    return np.fromiter(
        (token for row in plan.rows for token in row.sequence.token_ids[row.start : row.start + row.num_tokens]),
        dtype=dtype,
        count=plan.num_tokens,
    )


def _block_tables(rows: tuple[PlanRow, ...]) -> np.ndarray:
    """The rows' block tables, `[num_rows, longest]` int32, padded with the null block."""
    tables = np.zeros((len(rows), max(len(row.sequence.block_ids) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.sequence.block_ids)] = row.sequence.block_ids
    return tables


def sampling_batch(rows: Sequence[PlanRow], device: Device, penalty_rows: PenaltyRows) -> SamplingBatch:
    """What is to be done with the logits of these rows, `num_samples` for each; reads the requests, changes none."""
    draws = [(row.sequence, seed) for row in rows for seed in _seeds(row)]
    sequences = [sequence for sequence, _ in draws]
    params = [sequence.request.params for sequence in sequences]
    return SamplingBatch(
        temperature=[p.temperature for p in params],
        top_k=[max(p.top_k, 0) for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seeds=[seed for _, seed in draws],
        positions=[sequence.num_tokens for sequence in sequences],
        edits=logit_edits(sequences, device, penalty_rows),
        num_logprobs={index: p.num_logprobs for index, p in enumerate(params) if p.num_logprobs is not None},
        num_candidates={index: s.request.beams.num_candidates for index, s in enumerate(sequences) if s.request.beams},
    )


def _seeds(row: PlanRow) -> list[int]:
    """One seed for each draw of a row: the sequence's own, or one for each continuation that starts here."""
    if row.num_samples == 1:
        return [row.sequence.seed]
    return [choice_seed(row.sequence.request.seed, choice) for choice in range(row.num_samples)]
