"""Penalties on a CPU, which has lists of tokens, against the definition, which counts the whole vocabulary."""

from collections import Counter
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import penalties_cpu, reference_sampling
from kernels.reference_sampling import IN_PROMPT, NewTokens, Penalties

CPU = torch.device("cpu")
NUM_SLOTS, VOCAB_SIZE = 3, 200
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=150)
# Of a slot: the prompt if it begins anew, and what was generated since.
NEWS = st.dictionaries(st.integers(0, NUM_SLOTS - 1), st.tuples(st.none() | TOKENS, TOKENS), max_size=NUM_SLOTS)


def new_tokens(news: dict[int, tuple[list[int] | None, list[int]]]) -> NewTokens:
    fresh = [slot for slot, (prompt, _) in news.items() if prompt is not None]
    counted = [
        entry
        for slot, (prompt, output) in news.items()
        for entry in [(slot, token, IN_PROMPT) for token in set(prompt or ())] + [(slot, token, 1) for token in output]
    ]
    slots, token_ids, increments = torch.tensor(counted, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return NewTokens(torch.tensor(fresh, dtype=torch.int64), slots, token_ids, increments.int())


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(NEWS, max_size=6), st.permutations(range(NUM_SLOTS)), st.integers(0, 99))
def test_a_cpu_penalises_what_the_definition_penalises(steps, slots, seed):
    first = {slot: ([], []) for slot in range(NUM_SLOTS)}
    tables = [
        (module, module.allocate_counts(NUM_SLOTS, VOCAB_SIZE, CPU)) for module in (penalties_cpu, reference_sampling)
    ]
    generator = torch.Generator().manual_seed(seed)
    for news in [first, *steps]:
        logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator) * 4
        logits[:, ::5] = -torch.inf
        numbers = (torch.rand(NUM_SLOTS, generator=generator) * span for span in (2, 4, 4))
        asked = Penalties(torch.arange(NUM_SLOTS), torch.tensor(slots), *numbers)
        found = []
        for module, counts in tables:
            module.count_tokens(counts, new_tokens(news))
            module.apply_penalties(penalised := logits.clone(), counts, asked)
            found.append(penalised)
        assert torch.equal(*found)


@given(prompt=TOKENS, output=TOKENS, cuts=st.lists(st.integers(0, 150), max_size=5))
def test_counts_are_the_same_however_often_they_are_brought_up_to_date(prompt, output, cuts):
    counts = penalties_cpu.allocate_counts(1, VOCAB_SIZE, CPU)
    bounds = sorted({0, len(output), *(min(cut, len(output)) for cut in cuts)})
    penalties_cpu.count_tokens(counts, new_tokens({0: (prompt, [])}))
    for start, end in pairwise(bounds):
        penalties_cpu.count_tokens(counts, new_tokens({0: (None, output[start:end])}))
    expected = dict.fromkeys(prompt, 0) | Counter(output)
    assert dict(zip(counts[0].token_ids.tolist(), counts[0].output_counts.tolist(), strict=True)) == expected


def test_a_slot_that_changes_hands_knows_nothing_of_whom_it_had():
    for module in (penalties_cpu, reference_sampling):
        counts = module.allocate_counts(1, VOCAB_SIZE, CPU)
        module.count_tokens(counts, new_tokens({0: ([1, 2], [3, 3])}))
        module.count_tokens(counts, new_tokens({0: ([5], [6])}))
        logits = torch.full((1, VOCAB_SIZE), 4.0)
        one = torch.zeros(1, dtype=torch.int64)
        module.apply_penalties(logits, counts, Penalties(one, one, *torch.tensor([[2.0], [0.5], [0.25]])))
        assert {token: logits[0, token].item() for token in range(VOCAB_SIZE) if logits[0, token] != 4} == {
            5: 2.0,
            6: 1.25,
        }


def test_a_sequence_may_come_to_have_any_number_of_tokens():
    counts = penalties_cpu.allocate_counts(1, VOCAB_SIZE, CPU)
    output = [*range(VOCAB_SIZE), *range(0, VOCAB_SIZE, 2)]
    penalties_cpu.count_tokens(counts, new_tokens({0: ([1], output)}))
    assert counts[0].output_counts.tolist() == [2.0 - token % 2 for token in counts[0].token_ids.tolist()]
