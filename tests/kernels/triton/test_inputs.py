"""A step's inputs from the state of its rows, against their definition and against what a host would lay out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_inputs
from kernels.cache import NULL_BLOCK
from kernels.reference_inputs import PLACEHOLDER, InputTensors, RowState, StepRows
from kernels.triton import inputs
from tests.kernels.triton.poison import poisoned

BLOCK_SIZE = 4
MAX_BLOCKS = 326
NUM_ROWS = 6


def _rows(seed: int, num_rows: int = NUM_ROWS) -> RowState:
    generator = torch.Generator().manual_seed(seed)
    return RowState(
        block_tables=1 + torch.randperm(num_rows * MAX_BLOCKS, generator=generator).int().view(num_rows, MAX_BLOCKS),
        last_sampled=torch.randint(0, 50_000, (num_rows,), generator=generator).int(),
    )


def _clone(rows: RowState) -> RowState:
    return RowState(*(tensor.clone() for tensor in rows))


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _step(rows: list[int], lengths: list[int], num_computed: list[int], seed: int = 0) -> StepRows:
    starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    token_ids = torch.randint(0, 50_000, (starts[-1],), generator=torch.Generator().manual_seed(seed)).int()
    return StepRows(_int32(*rows), _int32(*starts), _int32(*num_computed), token_ids)


def _room(num_tokens: int, num_seqs: int, num_columns: int, *, stride: int | None = None) -> InputTensors:
    flat = (poisoned(num_tokens, dtype=torch.int64) for _ in range(3))
    per_seq = (poisoned(size, dtype=torch.int32) for size in (num_seqs + 1, num_seqs))
    return InputTensors(*flat, *per_seq, poisoned(num_seqs, stride or num_columns, dtype=torch.int32)[:, :num_columns])


STEPS = st.tuples(
    st.permutations(range(NUM_ROWS)),
    st.lists(
        st.tuples(st.one_of(st.just(1), st.integers(1, 9), st.just(1100)), st.integers(0, 60)), min_size=1, max_size=5
    ),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 99),
)


@settings(max_examples=25, derandomize=True)
@given(STEPS)
def test_the_inputs_of_mixed_and_padded_steps_are_their_definition(step):
    order, sequences, padded_seqs, padded_tokens, seed = step
    rows, before = _rows(seed), _rows(seed)
    lengths, num_computed = map(list, zip(*sequences, strict=True))
    known = _step(order[: len(lengths)], lengths, num_computed, seed)
    known.token_ids[known.query_start[1:].long()[::2] - 1] = PLACEHOLDER
    sizes = (sum(lengths) + padded_tokens, len(lengths) + padded_seqs, 300)
    got, expected = _room(*sizes, stride=310), _room(*sizes)
    inputs.build_inputs(rows, known, BLOCK_SIZE, got)
    reference_inputs.build_inputs(rows, known, BLOCK_SIZE, expected)
    for name, tensor in got._asdict().items():
        assert torch.equal(tensor, getattr(expected, name)), name
    assert all(map(torch.equal, rows, before))


def test_every_number_is_what_a_host_would_have_written():
    rows = _rows(7)
    rows.last_sampled[2] = 1234
    tables = rows.block_tables
    step = StepRows(_int32(4, 2, 0), _int32(0, 3, 4, 5), _int32(3, 9, 7), _int32(11, 12, 13, PLACEHOLDER, 14))
    for build in (inputs.build_inputs, reference_inputs.build_inputs):
        got = _room(7, 5, 4)
        build(rows, step, BLOCK_SIZE, got)
        assert got.token_ids.tolist() == [11, 12, 13, 1234, 14, 0, 0]
        assert got.positions.tolist() == [3, 4, 5, 9, 7, 0, 0]
        first, second, third = (
            int(tables[row, column]) * 4 + offset for row, column, offset in ((4, 0, 3), (2, 2, 1), (0, 1, 3))
        )
        chunk = [int(tables[4, 1]) * 4, int(tables[4, 1]) * 4 + 1]
        assert got.slot_mapping.tolist() == [first, *chunk, second, third, -1, -1]
        assert got.query_start.tolist() == [0, 3, 4, 5, 5, 5]
        assert got.seq_lens.tolist() == [6, 10, 8, 0, 0]
        assert got.block_tables.tolist() == [
            [*tables[4, :2].tolist(), NULL_BLOCK, NULL_BLOCK],
            [*tables[2, :3].tolist(), NULL_BLOCK],
            [*tables[0, :2].tolist(), NULL_BLOCK, NULL_BLOCK],
            *[[NULL_BLOCK] * 4] * 2,
        ]


def test_the_null_block_is_never_written():
    rows = _rows(2)
    rows.block_tables[0, 1:] = NULL_BLOCK
    got = _room(3, 1, 2)
    inputs.build_inputs(rows, _step([0], [3], [3]), BLOCK_SIZE, got)
    assert got.slot_mapping.tolist() == [int(rows.block_tables[0, 0]) * 4 + 3, -1, -1]


@settings(max_examples=15, derandomize=True)
@given(st.permutations(range(500)), st.lists(st.integers(0, 299), max_size=400), st.integers(0, 99))
def test_what_was_sampled_is_noted_in_its_row_and_no_other_changes(order, draws, seed):
    rows, expected = _rows(seed, 500), _rows(seed, 500)
    idx_mapping, sampled = _int32(*order[: len(draws)]), torch.arange(100, 400)
    inputs.advance_rows(rows, idx_mapping, _int32(*draws), sampled)
    reference_inputs.advance_rows(expected, idx_mapping, _int32(*draws), sampled)
    for name, tensor in rows._asdict().items():
        assert torch.equal(tensor, getattr(expected, name)), name
    assert rows.last_sampled[idx_mapping.long()].tolist() == [100 + draw for draw in draws]


def test_two_steps_follow_each_other_without_the_host():
    rows, got = _rows(3), _room(7, 1, 3)
    inputs.build_inputs(rows, _step([2], [7], [0]), BLOCK_SIZE, got)
    inputs.advance_rows(rows, _int32(2), _int32(1), torch.tensor([7, 777]))
    got = _room(1, 1, 3)
    step = _step([2], [1], [7])
    inputs.build_inputs(rows, step._replace(token_ids=_int32(PLACEHOLDER)), BLOCK_SIZE, got)
    assert [int(x) for x in (got.token_ids, got.positions, got.seq_lens)] == [777, 7, 8]
