"""The definitions of sampling on a device, which the Triton kernels are held to, are what the engine's sampler does."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SamplingBatch
from engine.device import CpuDevice
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.sampler import sample
from engine.sampling.token_rules import Edit, LogitEdits, apply_edits
from kernels import reference_sampling
from kernels.reference_sampling import Penalties, allocate_penalties

VOCAB_SIZES = st.sampled_from([2, 60, 1500])
ROW = st.tuples(
    st.sampled_from([0, 1, 3, 40, 2000]),
    st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.integers(0, 2**62),
    st.integers(0, 2**33),
)


def _logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if seed % 2 else logits


@settings(max_examples=80, derandomize=True)
@given(st.lists(ROW, min_size=1, max_size=5), VOCAB_SIZES, st.integers(0, 99))
def test_draws_above_the_floors_are_the_samplers(rows, vocab_size, seed):
    logits = _logits(len(rows), vocab_size, seed)
    top_k, top_p, min_p, temperatures, seeds, positions = (list(column) for column in zip(*rows, strict=True))
    batch = SamplingBatch(temperatures, top_k, top_p, min_p, seeds, positions)
    expected = sample(logits.clone(), batch, CpuDevice()).token_ids
    on_device = torch.tensor(temperatures)
    limits = torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    floors = reference_sampling.score_floors(logits, on_device, *limits)
    drawn = reference_sampling.gumbel_argmax_above(
        logits, on_device, torch.tensor(seeds), torch.tensor(positions), floors
    )
    assert drawn.tolist() == expected.tolist()


@settings(max_examples=40, derandomize=True)
@given(
    st.lists(st.integers(0, 59), max_size=30),
    st.lists(st.integers(0, 59), max_size=30),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, -0.4]),
)
def test_penalties_from_counts_are_the_samplers(prompt, output, repetition, presence, frequency):
    logits = _logits(2, 60, 0)
    logits[:, ::5] = -math.inf
    expected = logits.clone()
    token_ids = sorted({*prompt, *output})
    counts = torch.tensor([output.count(token) for token in token_ids]).float()
    subtracted = frequency * counts + presence * (counts > 0)
    edit = Edit(
        torch.ones(len(token_ids), dtype=torch.int64),
        torch.tensor(token_ids, dtype=torch.int64),
        (torch.full((len(token_ids),), repetition), subtracted),
    )
    apply_edits(expected, LogitEdits(None, None, edit, None))

    state = allocate_penalties(3, 60, torch.device("cpu"))
    history = torch.tensor([[*prompt, *output]], dtype=torch.int32)
    numbers = ([2], [0], [0], [history.shape[1]], [len(prompt)])
    slots, rows, starts, ends, prompts = (torch.tensor(column) for column in numbers)
    reference_sampling.count_tokens(state, slots, history, rows, starts, ends, prompts)
    one = (torch.tensor([number]) for number in (repetition, presence, frequency))
    reference_sampling.apply_penalties(logits, state, Penalties(torch.tensor([1]), slots, *one))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 4), VOCAB_SIZES, st.integers(0, 99), st.sampled_from([0, 1, 5, 20]))
def test_logprobs_ranks_and_the_likeliest_tokens_are_the_samplers(num_rows, vocab_size, seed, count):
    logits = _logits(num_rows, vocab_size, seed)
    token_ids = torch.randint(0, vocab_size, (num_rows,), generator=torch.Generator().manual_seed(seed))
    chosen, ranks = reference_sampling.token_logprobs(logits, token_ids)
    top = reference_sampling.top_logprobs(logits, count)
    expected = compute_logprobs(logits.log_softmax(dim=-1), token_ids, count)
    for found, wanted in zip((chosen, ranks, top.values, top.token_ids), expected, strict=True):
        assert torch.equal(found, wanted.to(found.dtype))
