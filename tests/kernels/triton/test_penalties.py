"""Penalties from counts on the device, against their definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_sampling
from kernels.reference_sampling import IN_PROMPT, Penalties
from kernels.triton import penalties

NUM_SLOTS = 6
VOCAB_SIZES = st.sampled_from([1, 31, 32, 100, 1024, 1500, 2049])


def _counts(vocab_size: int, seed: int) -> torch.Tensor:
    """Some tokens are in the prompt, some in the output, some in both, most in neither."""
    generator = torch.Generator().manual_seed(seed)
    in_prompt = torch.rand(NUM_SLOTS, vocab_size, generator=generator) < 0.3
    in_output = torch.randint(-5, 4, (NUM_SLOTS, vocab_size), generator=generator).clamp(min=0)
    return (in_output + in_prompt * IN_PROMPT).int()


@settings(max_examples=25, derandomize=True)
@given(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=4), VOCAB_SIZES, st.integers(0, 99))
def test_penalised_logits_are_those_of_the_definition_and_no_other_changes(slots, vocab_size, seed):
    counts, num_rows = _counts(vocab_size, seed), len(slots)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab_size, generator=generator) * 4
    logits[:, ::7] = -torch.inf
    expected = logits.clone()
    numbers = (torch.rand(num_rows, generator=generator) * span for span in (2, 4, 4))
    rows = torch.randperm(6, generator=generator)[:num_rows]
    chosen = Penalties(rows, torch.tensor(slots, dtype=torch.int64), *numbers)
    penalties.apply_penalties(logits, counts, chosen)
    reference_sampling.apply_penalties(expected, counts, chosen)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    others = [row for row in range(6) if row not in rows.tolist()]
    assert torch.equal(logits[others], expected[others])


def test_a_token_is_penalised_by_where_it_occurs():
    counts = torch.tensor([[0, IN_PROMPT, 2, IN_PROMPT + 1]], dtype=torch.int32)
    logits = torch.tensor([[6.0, 6.0, 6.0, -6.0]])
    one = torch.zeros(1, dtype=torch.int64)
    numbers = (torch.tensor([number]) for number in (2.0, 0.5, 0.25))
    penalties.apply_penalties(logits, counts, Penalties(one, one, *numbers))
    assert logits.tolist() == [[6.0, 3.0, 3.0 - 0.5 - 2 * 0.25, -12.0 - 0.5 - 0.25]]
