"""What requests say of single tokens, against Transformers' logits processors and plain definitions."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.device import CpuDevice
from engine.errors import RequestError
from engine.request import Request
from engine.row_slots import RowSlots
from engine.sampling.params import SamplingParams
from engine.sampling.penalties import PenaltyRows
from engine.sampling.token_rules import apply_edits, encode_bad_words, logit_edits
from tests.engine.models_fixture import byte_tokenizer
from tests.engine.toy import EOS, VOCAB_SIZE

CPU = CpuDevice()


def sequence_of(prompt, output, *, bad_words=(), **params):
    """A sequence in the middle of its answer."""
    sampling = SamplingParams(max_tokens=100, **params)
    asked = Request(0, prompt, sampling, seed=0, eos_token_ids=frozenset({EOS}), bad_words=bad_words)
    (sequence,) = asked.sequences
    sequence.token_ids.extend(output)
    return sequence


def edited(logits, *sequences):
    logits = logits.clone()
    if edits := logit_edits(list(sequences), CPU, PenaltyRows(RowSlots(len(sequences)))):
        apply_edits(logits, edits)
    return logits


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


tokens = st.lists(st.integers(0, 200), max_size=300)


@settings(max_examples=30, deadline=None)
@given(prompt=st.lists(st.integers(0, 30), min_size=1), output=tokens, penalty=st.sampled_from([0.5, 1.3, 2.0]))
def test_the_repetition_penalty_is_that_of_transformers(prompt, output, penalty):
    logits = random_logits(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    ours = edited(logits, sequence_of(prompt, output, repetition_penalty=penalty))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_presence_and_frequency_penalties_count_the_answer_alone():
    logits = random_logits(1)
    prompt, output = [7, 7, 8], [9, 9, 9, 8, 10]
    ours = edited(logits, sequence_of(prompt, output, presence_penalty=0.5, frequency_penalty=-0.25))
    expected = logits.clone()
    for token_id, count in Counter(output).items():
        expected[0, token_id] -= 0.5 - 0.25 * count
    torch.testing.assert_close(ours, expected)
    assert ours[0, 7] == logits[0, 7]


def test_the_repetition_penalty_comes_before_the_others():
    logits = torch.full((1, VOCAB_SIZE), 4.0)
    ours = edited(logits, sequence_of([1], [2], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5))
    assert ours[0, :4].tolist() == [4.0, 2.0, 0.5, 4.0]


def test_biases_come_before_penalties():
    logits = torch.full((1, VOCAB_SIZE), 1.0)
    ours = edited(logits, sequence_of([1], [], repetition_penalty=2.0, logit_bias={1: 3, 2: -100}))
    assert ours[0, 1:4].tolist() == [2.0, -99.0, 1.0]


def test_a_bias_is_that_of_transformers():
    logits = random_logits(1)
    bias = {3: 10.0, 250: -100.0, 4: 0.5}
    theirs = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})
    ours = edited(logits, sequence_of([3], [4], logit_bias=bias))
    torch.testing.assert_close(ours, theirs(torch.tensor([[3, 4]]), logits.clone()))


def test_only_allowed_tokens_are_left():
    logits = random_logits(1)
    ours = edited(logits, sequence_of([1], [2], allowed_token_ids=[9, 5, 5, VOCAB_SIZE - 1]))
    left = torch.isfinite(ours[0]).nonzero().flatten().tolist()
    assert left == [5, 9, VOCAB_SIZE - 1]
    assert ours[0, left].tolist() == logits[0, left].tolist()


def test_min_tokens_rules_out_what_ends_the_answer_until_then():
    logits = random_logits(1)
    for count in range(5):
        output = list(range(count))
        ours = edited(logits, sequence_of([1, 2], output, min_tokens=3, stop_token_ids=[40]))
        theirs = MinNewTokensLengthLogitsProcessor(2, 3, [EOS, 40])(torch.tensor([[1, 2, *output]]), logits.clone())
        torch.testing.assert_close(ours, theirs)
        assert math.isinf(ours[0, 40]) == (count < 3)


BAD = ((5,), (6, 7), (6, 6, 7), (8, 9, 10, 11))


@pytest.mark.parametrize(
    ("context", "banned"),
    [
        ([1], {5}),
        ([1, 6], {5, 7}),
        ([1, 6, 6], {5, 7}),
        ([1, 7, 6, 8], {5}),
        ([1, 8, 9, 10], {5, 11}),
        ([8, 9, 10], {5, 11}),
        ([9, 10], {5}),
    ],
)
def test_bad_words_are_those_of_transformers_and_may_begin_in_the_prompt(context, banned):
    logits = random_logits(1)
    theirs = NoBadWordsLogitsProcessor([list(word) for word in BAD])(torch.tensor([context]), logits.clone())
    for cut in range(1, len(context) + 1):
        ours = edited(logits, sequence_of(context[:cut], context[cut:], bad_words=BAD))
        torch.testing.assert_close(ours, theirs)
    assert set(torch.isinf(ours[0]).nonzero().flatten().tolist()) == banned


def test_each_row_has_its_own_rules_and_plain_rows_none():
    logits = random_logits(5)
    sequences = [
        sequence_of([1, 2], [3, 3], repetition_penalty=1.5, logit_bias={9: 4}),
        sequence_of([1, 2], [3, 3]),
        sequence_of([4], [6], bad_words=BAD, allowed_token_ids=[1, 2, 7]),
        sequence_of([4], [6, 6], frequency_penalty=2, min_tokens=50),
        sequence_of([4], [6, 6], logit_bias={8: -5}, presence_penalty=1),
    ]
    together = edited(logits, *sequences)
    for row, sequence in enumerate(sequences):
        assert together[row].equal(edited(logits[row : row + 1], sequence)[0])
    assert together[1].equal(logits[1])


def test_requests_without_rules_have_nothing_to_collect():
    plain = sequence_of([1, 2], [3], temperature=0.7, top_p=0.5, stop_token_ids=[3])
    assert plain.request.token_rules is None
    assert logit_edits([plain, plain], CPU, PenaltyRows(RowSlots(2))) is None


def test_bad_words_are_encoded_with_a_space_before_them_and_without():
    tokenizer = byte_tokenizer()
    encoded = encode_bad_words(tokenizer, ["ab", " cd", "ab"])
    assert [tokenizer.decode(list(ids)) for ids in encoded] == ["ab", " ab", "cd", " cd"]
    assert encode_bad_words(tokenizer, [" "]) == (tuple(tokenizer.encode(" ")),)


@pytest.mark.model
def test_a_word_has_tokens_of_its_own_after_a_space(smollm2_tokenizer):
    (bare,), (spaced,) = encode_bad_words(smollm2_tokenizer, ["Paris"])
    assert bare != spaced
    assert smollm2_tokenizer.decode([bare]) == "Paris"
    assert smollm2_tokenizer.decode([spaced]) == " Paris"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_token_that_the_model_does_not_have_is_refused_by_its_field(name):
    value = {VOCAB_SIZE: 1.0} if name == "logit_bias" else [3, VOCAB_SIZE]
    params = SamplingParams(**{name: value})
    params.check_vocabulary(VOCAB_SIZE + 1)
    with pytest.raises(RequestError, match=str(VOCAB_SIZE)) as refused:
        params.check_vocabulary(VOCAB_SIZE)
    assert refused.value.field == name
