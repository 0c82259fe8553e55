"""A step's inputs from the state of its rows, against their definition and against what the host lays out itself."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_inputs
from kernels.reference_inputs import PLACEHOLDER, RowState, StepInputs
from kernels.triton import inputs
from tests.kernels.triton.poison import poisoned

BLOCK_SIZE = 4
MAX_LEN = 1300


def _rows(max_rows: int, seed: int) -> RowState:
    """Rows of which each has all the blocks that its longest history needs."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-MAX_LEN // BLOCK_SIZE)
    return RowState(
        token_ids=torch.randint(0, 50_000, (max_rows, MAX_LEN), generator=generator).int(),
        num_computed=torch.randint(0, 40, (max_rows,), generator=generator).int(),
        block_tables=1 + torch.randperm(max_rows * num_blocks, generator=generator).int().view(max_rows, num_blocks),
        last_sampled=torch.randint(0, 50_000, (max_rows,), generator=generator).int(),
    )


def _clone(rows: RowState) -> RowState:
    return RowState(*(tensor.clone() for tensor in rows))


def _poisoned_inputs(num_tokens: int, num_seqs: int, num_columns: int) -> StepInputs:
    flat = (poisoned(num_tokens, dtype=torch.int64) for _ in range(3))
    tables = poisoned(num_seqs, num_columns, dtype=torch.int32)
    return StepInputs(*flat, seq_lens=poisoned(num_seqs, dtype=torch.int32), block_tables=tables)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STEPS = st.tuples(
    st.permutations(range(6)),
    st.lists(st.one_of(st.just(1), st.integers(1, 9), st.just(1100)), min_size=0, max_size=5),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 99),
)


@settings(max_examples=25, derandomize=True)
@given(STEPS)
def test_the_inputs_of_mixed_and_padded_steps_are_their_definition(step):
    order, lengths, padded_seqs, padded_tokens, seed = step
    rows = _rows(6, seed)
    for row in order[: len(lengths)][::2]:
        rows.token_ids[row, rows.num_computed[row] + lengths[order.index(row)] - 1] = PLACEHOLDER
    idx_mapping = _int32(*order[: len(lengths)], *[-1] * padded_seqs)
    starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    query_start = _int32(*starts, *[starts[-1]] * padded_seqs)
    num_tokens, num_seqs = starts[-1] + padded_tokens, len(idx_mapping)
    got, expected = (_poisoned_inputs(num_tokens, num_seqs, 330) for _ in range(2))
    before = _clone(rows)
    inputs.build_inputs(rows, idx_mapping, query_start, BLOCK_SIZE, got)
    reference_inputs.build_inputs(before, idx_mapping, query_start, BLOCK_SIZE, expected)
    for name, tensor in got._asdict().items():
        assert torch.equal(tensor, getattr(expected, name)), name
    assert all(map(torch.equal, rows, before))


def test_a_decode_reads_the_token_in_flight_and_padding_stores_nothing():
    rows = _rows(3, 0)
    rows.num_computed[:] = _int32(5, 7, 9)
    rows.token_ids[2, 9] = PLACEHOLDER
    rows.last_sampled[2] = 1234
    got = _poisoned_inputs(4, 4, 3)
    inputs.build_inputs(rows, _int32(2, 0, -1, -1), _int32(0, 1, 2, 2, 2), BLOCK_SIZE, got)
    assert got.token_ids.tolist() == [1234, int(rows.token_ids[0, 5]), 0, 0]
    assert got.positions.tolist() == [9, 5, 0, 0]
    tables = rows.block_tables
    assert got.slot_mapping.tolist() == [int(tables[2, 2]) * 4 + 1, int(tables[0, 1]) * 4 + 1, -1, -1]
    assert got.seq_lens.tolist() == [10, 6, 0, 0]
    assert got.block_tables.tolist() == [tables[2, :3].tolist(), [*tables[0, :2].tolist(), 0], [0] * 3, [0] * 3]


def test_padded_sequences_may_have_tokens_of_their_own():
    rows = _rows(2, 1)
    got = _poisoned_inputs(4, 4, 2)
    rows.num_computed[:] = 2
    inputs.build_inputs(rows, _int32(1, -1, -1, -1), _int32(0, 1, 2, 3, 4), BLOCK_SIZE, got)
    assert got.slot_mapping.tolist()[1:] == [-1, -1, -1]
    assert got.token_ids.tolist()[1:] == got.positions.tolist()[1:] == got.seq_lens.tolist()[1:] == [0, 0, 0]


def test_the_null_block_is_never_written():
    rows = _rows(1, 2)
    rows.num_computed[0] = 3
    rows.block_tables[0, 1:] = 0
    got = _poisoned_inputs(3, 1, 2)
    inputs.build_inputs(rows, _int32(0), _int32(0, 3), BLOCK_SIZE, got)
    assert got.slot_mapping.tolist() == [int(rows.block_tables[0, 0]) * 4 + 3, -1, -1]


@settings(max_examples=25, derandomize=True)
@given(
    st.permutations(range(6)),
    st.lists(st.tuples(st.integers(1, 1261), st.booleans()), max_size=5),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_what_was_sampled_is_appended_to_its_row_and_no_other_changes(order, sequences, padded_seqs, seed):
    rows = _rows(6, seed)
    expected = _clone(rows)
    lengths = [length for length, _ in sequences]
    idx_mapping = _int32(*order[: len(lengths)], *[-1] * padded_seqs)
    starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    query_start = _int32(*starts, *[starts[-1]] * padded_seqs)
    places = iter(range(len(sequences)))
    sample_of = _int32(*(next(places) if samples else -1 for _, samples in sequences), *[-1] * padded_seqs)
    sampled = torch.arange(100, 100 + len(sequences))
    inputs.advance_rows(rows, idx_mapping, query_start, sample_of, sampled)
    reference_inputs.advance_rows(expected, idx_mapping, query_start, sample_of, sampled)
    for name, tensor in rows._asdict().items():
        assert torch.equal(tensor, getattr(expected, name)), name


def test_two_steps_follow_each_other_without_the_host():
    rows = _rows(4, 3)
    prompt, start = rows.token_ids[2, :7].tolist(), _int32(0, 7)
    rows.num_computed[2] = 0
    got = _poisoned_inputs(7, 1, 3)
    inputs.build_inputs(rows, _int32(2), start, BLOCK_SIZE, got)
    assert got.token_ids.tolist() == prompt
    inputs.advance_rows(rows, _int32(2), start, _int32(1), torch.tensor([7, 777]))
    got = _poisoned_inputs(1, 1, 3)
    inputs.build_inputs(rows, _int32(2), _int32(0, 1), BLOCK_SIZE, got)
    assert [int(x) for x in (got.token_ids, got.positions, got.seq_lens)] == [777, 7, 8]
    inputs.advance_rows(rows, _int32(2), _int32(0, 1), _int32(0), torch.tensor([888]))
    assert rows.token_ids[2, :9].tolist() == [*prompt, 777, 888]


def test_the_token_after_the_last_of_a_full_history_is_in_no_history():
    rows = _rows(3, 4)
    rows.num_computed[1] = MAX_LEN - 1
    histories = rows.token_ids.clone()
    inputs.advance_rows(rows, _int32(1), _int32(0, 1), _int32(0), torch.tensor([777_777]))
    assert torch.equal(rows.token_ids, histories)
    assert rows.num_computed[1] == MAX_LEN
    assert rows.last_sampled[1] == 777_777
