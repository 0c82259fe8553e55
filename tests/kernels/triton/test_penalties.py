"""Penalties from counts on the device, against their definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_sampling
from kernels.reference_sampling import Penalties, PenaltyState, allocate_penalties
from kernels.triton import penalties

CPU = torch.device("cpu")
NUM_SLOTS = 6
VOCAB_SIZES = st.sampled_from([1, 31, 32, 100, 1024, 1500, 2049])


def _counted(vocab_size: int, seed: int) -> PenaltyState:
    generator = torch.Generator().manual_seed(seed)
    state = allocate_penalties(NUM_SLOTS, vocab_size, CPU)
    state.output_counts.copy_(torch.randint(-3, 4, state.output_counts.shape, generator=generator).clamp(min=0))
    state.in_prompt.copy_(torch.randint(-(2**31), 2**31, state.in_prompt.shape, generator=generator))
    return state


@settings(max_examples=25, derandomize=True)
@given(st.permutations(range(NUM_SLOTS)), st.integers(0, 4), VOCAB_SIZES, st.integers(0, 99))
def test_penalised_logits_are_those_of_the_definition_and_no_other_changes(slots, num_rows, vocab_size, seed):
    state = _counted(vocab_size, seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab_size, generator=generator) * 4
    logits[:, ::7] = -torch.inf
    expected = logits.clone()
    numbers = (torch.rand(num_rows, generator=generator) * span for span in (2, 4, 4))
    rows = torch.randperm(6, generator=generator)[:num_rows]
    chosen = Penalties(rows, torch.tensor(slots[:num_rows], dtype=torch.int64), *numbers)
    penalties.apply_penalties(logits, state, chosen)
    reference_sampling.apply_penalties(expected, state, chosen)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    others = [row for row in range(6) if row not in rows.tolist()]
    assert torch.equal(logits[others], expected[others])


@settings(max_examples=25, derandomize=True)
@given(
    st.permutations(range(NUM_SLOTS)),
    st.permutations(range(NUM_SLOTS)),
    st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 1100), st.integers(0, 1200)), max_size=4),
    VOCAB_SIZES,
    st.integers(0, 99),
)
def test_tokens_are_counted_as_the_definition_counts_them(slots, rows, spans, vocab_size, seed):
    # Few different tokens, so that one program counts the same one many times.
    histories = torch.randint(-1, min(vocab_size, 40), (NUM_SLOTS, 1100), generator=torch.Generator().manual_seed(seed))
    histories[:, ::9] = vocab_size - 1
    columns = [slots[: len(spans)], rows[: len(spans)], *(zip(*spans, strict=True) if spans else [(), (), ()])]
    slot, row, start, end, prompt = (torch.tensor(list(column), dtype=torch.int64) for column in columns)
    state = _counted(vocab_size, seed)
    expected = PenaltyState(*(tensor.clone() for tensor in state))
    penalties.count_tokens(state, slot, histories.int(), row, start, end, prompt)
    reference_sampling.count_tokens(expected, slot, histories.int(), row, start, end, prompt)
    assert torch.equal(state.output_counts, expected.output_counts)
    assert torch.equal(state.in_prompt, expected.in_prompt)


def test_one_token_a_step_comes_to_the_same_as_all_at_once():
    histories = torch.tensor([[5, 5, 31, 63, 5, 7, 31]], dtype=torch.int32)
    zero, prompt = torch.tensor([0]), torch.tensor([3])
    at_once, by_step = (allocate_penalties(1, 64, CPU) for _ in range(2))
    penalties.count_tokens(at_once, zero, histories, zero, zero, torch.tensor([7]), prompt)
    for position in range(7):
        start = torch.tensor([position])
        penalties.count_tokens(by_step, zero, histories, zero, start, start + 1, prompt)
    assert all(map(torch.equal, at_once, by_step))
    assert at_once.output_counts[0].nonzero().flatten().tolist() == [5, 7, 31, 63]
    assert at_once.in_prompt.tolist() == [[(1 << 5) - (1 << 31), 0]]
