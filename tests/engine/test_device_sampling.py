"""The definitions of sampling on a device, which the Triton kernels are held to, are what the engine's sampler does."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SamplingBatch
from engine.device import CpuDevice
from engine.sampling.sampler import sample
from kernels import logprobs_cpu, reference_sampling
from kernels.reference_sampling import Limits

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
    limits = Limits(torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))
    numbers = torch.tensor(temperatures), torch.tensor(seeds), torch.tensor(positions)
    assert reference_sampling.draw(logits, *numbers, limits).tolist() == expected.tolist()


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 4), VOCAB_SIZES, st.integers(0, 99), st.sampled_from([0, 1, 5, 20]))
def test_logprobs_ranks_and_the_likeliest_tokens_are_those_of_a_cpu(num_rows, vocab_size, seed, count):
    logits = _logits(num_rows, vocab_size, seed)
    token_ids = torch.randint(0, vocab_size, (num_rows,), generator=torch.Generator().manual_seed(seed))
    found, expected = (module.token_logprobs(logits, token_ids, count) for module in (reference_sampling, logprobs_cpu))
    assert all(map(torch.equal, found, expected))
