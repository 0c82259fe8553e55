"""The sampler against plain definitions of its stages, and its noise against statistics."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import SamplingBatch
from engine.device import CpuDevice
from engine.sampling.sampler import read_draws
from engine.sampling.sampler import sample as sample_rows
from engine.sampling.token_rules import Allowed, Edit, LogitEdits
from kernels.floors_cpu import _TOP_P_CANDIDATES, top_k_floor, top_p_floor


def draw(logits, batch):
    device = CpuDevice()
    return read_draws(batch, device.download(lambda: sample_rows(logits, batch, device).tensors()).wait())


def sample(logits, batch):
    """The token of each row."""
    return tuple(sampled.token_id for sampled in draw(logits, batch))


def sampling(rows, **columns):
    defaults = {
        "temperature": [1.0] * rows,
        "top_k": [0] * rows,
        "top_p": [1.0] * rows,
        "min_p": [0.0] * rows,
        "seeds": list(range(rows)),
        "positions": [7] * rows,
    }
    return SamplingBatch(**{**defaults, **columns})


def kept_by_definition(logits, k, p, min_p):
    """The set of tokens that one row may yield, by sets and loops. Ties with the last one kept are kept."""
    probability = torch.softmax(logits.double(), 0).tolist()
    order = sorted(range(len(probability)), key=lambda i: -probability[i])
    kept = set(order)
    if k:
        kept = {i for i in kept if probability[i] >= probability[order[k - 1]]}
    if p < 1:
        total = sum(probability[i] for i in kept)
        reached, floor = 0.0, math.inf
        for i in (i for i in order if i in kept):
            if reached >= p:
                break
            reached += probability[i] / total
            floor = probability[i]
        kept = {i for i in kept if probability[i] >= floor}
    return {i for i in kept if probability[i] >= min_p * probability[order[0]]}


# Multiples of 0.25 so that ties are frequent; of p and min_p no value that a sum of such probabilities hits exactly.
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=8, max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    logits=logit_rows,
    k=st.integers(0, 8),
    p=st.sampled_from([0.0717, 0.3313, 0.6121, 0.9177, 1.0]),
    min_p=st.sampled_from([0.0, 0.0331, 0.2113, 0.7771]),
)
def test_the_tokens_drawn_are_those_of_the_plain_definition(logits, k, p, min_p):
    draws = 400
    rows = torch.tensor([logits]).repeat(draws, 1)
    batch = sampling(draws, top_k=[k] * draws, top_p=[p] * draws, min_p=[min_p] * draws, seeds=[3] * draws)
    drawn = set(sample(rows, batch._replace(positions=list(range(draws)))))
    kept = kept_by_definition(torch.tensor(logits), k, p, min_p)
    assert drawn <= kept
    probability = torch.softmax(torch.tensor(logits), 0)
    # What is drawn with a chance of 4 % or more is missing from 400 draws less than once in ten million.
    assert {i for i in kept if probability[i] >= 0.04} <= drawn


def test_greedy_takes_the_likeliest_and_of_equals_the_first():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 5.0]])
    assert sample(logits, sampling(2, temperature=[0.0, 0.0])) == (1, 0)


def test_a_row_keeps_its_own_parameters_in_a_mixed_batch():
    torch.manual_seed(0)
    logits = torch.randn(5, 50)
    batch = sampling(
        5,
        temperature=[0.0, 1.0, 0.7, 0.0, 2.0],
        top_k=[0, 3, 0, 5, 0],
        top_p=[1, 1, 0.5, 1, 1],
        min_p=[0, 0, 0, 0, 0.3],
    )
    together = sample(logits.clone(), batch)
    for row in range(5):
        alone = SamplingBatch(*[column[row : row + 1] for column in batch[:6]])
        assert sample(logits[row : row + 1].clone(), alone) == together[row : row + 1]


def test_noise_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 1000)
    at = {
        (seed, position): sample(logits.clone(), sampling(1, seeds=[seed], positions=[position]))
        for seed in (1, 2, -5, 2**62)
        for position in (0, 1)
    }
    assert len(set(at.values())) == len(at)
    again = sample(torch.zeros(2, 1000), sampling(2, seeds=[2, 1], positions=[1, 0]))
    assert again == (*at[2, 1], *at[1, 0])


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -3.0])
    draws, temperature = 20_000, 1.3
    tokens = sample(
        logits.repeat(draws, 1),
        sampling(draws, temperature=[temperature] * draws, seeds=[11] * draws, positions=list(range(draws))),
    )
    counts = torch.bincount(torch.tensor(tokens), minlength=6)
    expected = torch.softmax(logits / temperature, 0) * draws
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 20.5, "0.1 % of fair samplers exceed this with 5 degrees of freedom"


def ruled_out(row, token_ids):
    rows = torch.full((len(token_ids),), row)
    return LogitEdits(None, None, None, Edit(rows, torch.tensor(token_ids)))


def test_banned_tokens_are_never_drawn_not_even_greedily():
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 1.0, 2.0]])
    assert sample(logits.clone(), sampling(2, temperature=[0.0, 0.0], edits=ruled_out(1, [0]))) == (0, 2)
    assert sample(logits.clone(), sampling(2, top_k=[1, 1], edits=ruled_out(0, [0, 2]))) == (1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_ruled_out_has_no_token_and_says_why(temperature):
    logits = torch.randn(3, 4)
    logits[2, 1] = math.nan
    drawn = draw(logits, sampling(3, temperature=[temperature] * 3, edits=ruled_out(1, [0, 1, 2, 3])))
    assert [(one.token_id is None, one.all_ruled_out) for one in drawn] == [(False, False), (True, True), (True, False)]


def test_logprobs_are_those_of_the_model_whatever_is_done_to_its_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    edits = ruled_out(1, logits[1].topk(3).indices.tolist())
    batch = sampling(3, temperature=[0.3, 0.0, 1.0], top_k=[2, 0, 0], edits=edits, num_logprobs={0: 0, 1: 4})
    drawn = draw(logits.clone(), batch)
    expected = torch.log_softmax(logits, -1)
    for row, top in ((0, 0), (1, 4)):
        entry = drawn[row].logprobs
        assert entry.token_id == drawn[row].token_id
        assert entry.logprob == expected[row, entry.token_id].item()
        assert [token_id for token_id, _ in entry.top] == expected[row].topk(top).indices.tolist()
    assert drawn[1].logprobs.rank == 4, "greedy takes the fourth, since three are ruled out"
    assert drawn[2].logprobs is None


def test_asking_for_logprobs_changes_no_token():
    logits = torch.randn(4, 300)
    assert sample(logits.clone(), sampling(4)) == sample(logits.clone(), sampling(4, num_logprobs={1: 20, 3: 0}))


def test_a_beams_candidates_are_its_likeliest_tokens_by_their_edited_logprobs():
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    best = logits[1].argmax().item()
    drawn = draw(logits.clone(), sampling(2, temperature=[0.0, 0.0], edits=ruled_out(1, [best]), num_candidates={1: 5}))
    expected = torch.log_softmax(logits[1], -1)
    expected[best] = -math.inf
    values, token_ids = expected.topk(5)
    assert drawn[1].candidates == tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    assert drawn[0].candidates == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_cost_only_their_own_row(bad, temperature):
    logits = torch.randn(3, 20)
    clean = sample(logits.clone(), sampling(3, temperature=[temperature] * 3, top_p=[0.9] * 3))
    logits[1, 4] = bad
    dirty = sample(logits, sampling(3, temperature=[temperature] * 3, top_p=[0.9] * 3))
    assert dirty == (clean[0], None, clean[2])


def test_a_temperature_next_to_zero_is_greedy():
    torch.manual_seed(0)
    logits = torch.randn(4, 100) * 1e-3
    assert list(sample(logits.clone(), sampling(4, temperature=[1e-45] * 4))) == logits.argmax(-1).tolist()


def test_no_temperature_however_high_draws_what_is_ruled_out():
    logits = torch.randn(64, 8)
    allowed = Allowed(torch.arange(64), Edit(*everywhere(64, [2, 5])))
    edits = LogitEdits(None, allowed, None, None)
    assert set(sample(logits, sampling(64, temperature=[1e39] * 64, edits=edits))) == {2, 5}


def everywhere(rows, token_ids):
    return torch.arange(rows).repeat_interleave(len(token_ids)), torch.tensor(token_ids * rows)


def test_top_p_beyond_the_candidates_sorts_the_whole_row():
    vocab = 3 * _TOP_P_CANDIDATES
    flat = torch.linspace(0, 0.001, vocab)
    peaked = torch.full((vocab,), -50.0).index_fill_(0, torch.tensor([5]), 0.0)
    floor = top_p_floor(torch.stack([flat, peaked]), torch.tensor([0.9, 0.9]))
    kept = (torch.stack([flat, peaked]) >= floor[:, None]).sum(-1).tolist()
    assert kept[0] == pytest.approx(0.9 * vocab, abs=3)
    assert kept[1] == 1


def test_top_k_floor_differs_by_row():
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0], [4.0, 1.0, 3.0, 2.0]])
    assert top_k_floor(scores, torch.tensor([1, 3])).tolist() == [4.0, 2.0]
