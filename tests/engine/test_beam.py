"""Beam search, answer for answer what Transformers' is, in any batch and in any pool."""

import math
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from engine import LLM, SamplingParams
from engine.messages import NewRequest
from tests.engine.models_fixture import tiny_llama
from tests.engine.toy import EOS, VOCAB_SIZE, FaultyRunner, ToyModel, toy_core, toy_limits, toy_runner

NEW_TOKENS = 12
PROMPT_LENGTH = 13
# So many that a fair share of the answers ends early, and that each way to stop a search stops some of them elsewhere
# than the others do. The model's own ends are </s> and <|im_end|>.
STOP_TOKEN_IDS = list(range(0, 256, 8))
ENDS = [257, 259, *STOP_TOKEN_IDS]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def reference(model_path):
    return LlamaForCausalLM.from_pretrained(model_path).eval()


@pytest.fixture(scope="module")
def llm(model_path):
    return LLM(str(model_path), dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def small_llm(model_path):
    """Room for one request of full length, and three seats."""
    options = {"num_kv_blocks": 8, "block_size": 4, "max_model_len": 28, "max_num_seqs": 3}
    return LLM(str(model_path), dtype="float32", num_threads=1, **options)


def prompts(count):
    return torch.randint(0, 256, (count, PROMPT_LENGTH), generator=torch.Generator().manual_seed(3)).tolist()


def expected_answers(reference, prompts, width, length_penalty=1.0, early_stopping=False, ends=ENDS, **options):
    """For each prompt Transformers' `width` best answers, as token ids and score."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    answers = []
    for row, score in zip(output.sequences[:, PROMPT_LENGTH:].tolist(), output.sequences_scores.tolist(), strict=True):
        length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        answers.append((row[:length], score))
    return [answers[start : start + width] for start in range(0, len(answers), width)]


def check_answers(outputs, expected, length_penalty=1.0):
    for output, answers in zip(outputs, expected, strict=True):
        assert output.error is None
        assert [completion.index for completion in output.outputs] == list(range(len(answers)))
        assert [list(completion.token_ids) for completion in output.outputs] == [token_ids for token_ids, _ in answers]
        for completion, (token_ids, score) in zip(output.outputs, answers, strict=True):
            assert completion.cumulative_logprob / len(token_ids) ** length_penalty == pytest.approx(score, rel=1e-5)
            assert completion.finish_reason == ("stop" if token_ids[-1] in ENDS else "length")
            assert completion.stop_reason == (token_ids[-1] if token_ids[-1] in STOP_TOKEN_IDS else None)


def search(width, **params):
    return SamplingParams(
        **{
            "temperature": 0,
            "beam_width": width,
            "n": width,
            "max_tokens": NEW_TOKENS,
            "stop_token_ids": STOP_TOKEN_IDS,
            **params,
        }
    )


# Every two of the values of different columns stand together in one line.
@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        (2, 0.6, False),
        (2, 1.0, True),
        (2, 2.0, "never"),
        (3, 0.6, True),
        (3, 1.0, "never"),
        (3, 2.0, False),
        (4, 0.6, "never"),
        (4, 1.0, False),
        (4, 2.0, True),
    ],
)
def test_32_searches_find_what_transformers_finds(llm, reference, width, length_penalty, early_stopping):
    expected = expected_answers(reference, prompts(32), width, length_penalty, early_stopping)
    params = search(width, length_penalty=length_penalty, early_stopping=early_stopping)
    outputs = llm.generate(prompts(32), params)
    check_answers(outputs, expected, length_penalty)
    reasons = {completion.finish_reason for output in outputs for completion in output.outputs}
    assert reasons == {"stop", "length"}, "a search in which nothing ends early, or nothing late, shows little"
    llm._core.scheduler.check_integrity()


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0])
def test_a_length_penalty_may_favour_short_answers(llm, reference, length_penalty):
    expected = expected_answers(reference, prompts(16), 3, length_penalty)
    check_answers(llm.generate(prompts(16), search(3, length_penalty=length_penalty)), expected, length_penalty)


def test_a_search_of_width_one_is_greedy(llm):
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, stop_token_ids=STOP_TOKEN_IDS)
    for searched, picked in zip(llm.generate(prompts(8), search(1)), llm.generate(prompts(8), greedy), strict=True):
        assert searched.outputs[0].token_ids == picked.outputs[0].token_ids


def test_fewer_answers_than_beams_are_the_best_of_them(llm):
    all_four, best_two = (llm.generate(prompts(4), search(4, n=n)) for n in (4, 2))
    for many, few in zip(all_four, best_two, strict=True):
        assert few.outputs == many.outputs[:2]


@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_that_are_preempted_find_the_same(small_llm, reference, width):
    before = small_llm.stats().preemptions
    outputs = small_llm.generate(prompts(5), search(width))
    check_answers(outputs, expected_answers(reference, prompts(5), width))
    assert small_llm.stats().preemptions > before
    assert small_llm.stats().kv_blocks_used == 0
    small_llm._core.scheduler.check_integrity()


def test_a_search_finds_the_same_alone_and_among_others(llm):
    alone = [llm.generate([prompt], search(3))[0].outputs for prompt in prompts(4)]
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    several = SamplingParams(n=3, max_tokens=20, seed=1)
    mixed = [prompt for prompt in prompts(4) for _ in range(3)]
    outputs = llm.generate(mixed, [search(3), greedy, several] * 4)
    assert [output.outputs for output in outputs[::3]] == alone


def test_rules_for_single_tokens_are_applied_to_logprobs_as_transformers_does(llm, reference):
    free = llm.generate(prompts(16), search(3))
    used = {token_id for output in free for completion in output.outputs for token_id in completion.token_ids}
    # Letters, of which the engine and Transformers make the same single token; none of them after a space.
    words = [word for word in map(chr, range(97, 123)) if llm.tokenizer.encode(word)[0] in used]
    assert len(words) > 3
    expected = expected_answers(
        reference,
        prompts(16),
        3,
        repetition_penalty=1.4,
        min_new_tokens=5,
        bad_words_ids=[llm.tokenizer.encode(word) for word in words],
    )
    ruled = llm.generate(prompts(16), search(3, repetition_penalty=1.4, min_tokens=5, bad_words=words))
    check_answers(ruled, expected)
    assert [output.outputs for output in ruled] != [output.outputs for output in free]


def test_end_tokens_that_are_ignored_do_not_end_a_beam(llm, reference):
    expected = expected_answers(reference, prompts(8), 3, ends=[319])
    outputs = llm.generate(prompts(8), search(3, ignore_eos=True, stop_token_ids=[319]))
    assert [[list(c.token_ids) for c in output.outputs] for output in outputs] == [
        [token_ids for token_ids, _ in answers] for answers in expected
    ]


class TwoWays(ToyModel):
    """After any context, all tokens are possible, those near the toy's own are likelier."""

    def logits(self, hidden):
        distance = (torch.arange(VOCAB_SIZE) - hidden[:, :1]).abs()
        return -distance.float() / 3


def finish(core):
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
        core.scheduler.check_integrity()
    return {output.index: output for output in outputs}


def toy_search(limits, model, **params):
    core = toy_core(limits, runner=toy_runner(limits, model))
    core.add_requests([NewRequest(0, [1, 2, 3], SamplingParams(temperature=0, max_tokens=8, **params))])
    return core


def test_beams_share_blocks_and_give_all_of_them_back():
    limits = toy_limits(max_num_seqs=8)
    core = toy_search(limits, TwoWays(), beam_width=6, n=6, ignore_eos=True)
    most = 0
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
        core.scheduler.check_integrity()
        most = max(most, core.stats().kv_blocks_used)
    assert len(outputs[0].outputs) == 6
    assert most < 6 * 3, "six beams of eleven tokens with nothing shared hold three blocks each"
    assert core.stats().kv_blocks_used == 0


questions = st.tuples(
    # Two blocks to begin with and few ends, so that prompts often begin alike.
    st.builds(lambda token, tail: [token] * 8 + tail, st.integers(1, 2), st.lists(st.integers(1, 2), max_size=5)),
    st.one_of(
        st.builds(
            search,
            st.integers(1, 6),
            max_tokens=st.integers(1, 10),
            early_stopping=st.sampled_from([False, True, "never"]),
            stop_token_ids=st.just(list(range(100, 130))),
        ),
        st.builds(SamplingParams, n=st.integers(1, 4), max_tokens=st.integers(1, 10), seed=st.just(3)),
    ),
)
tight_limits = st.builds(
    toy_limits,
    max_model_len=st.just(24),
    num_kv_blocks=st.integers(7, 16),
    num_host_blocks=st.sampled_from([0, 4, 30]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(2, 20),
    enable_prefix_caching=st.booleans(),
)
seen = set()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(limits=tight_limits, questions=st.lists(questions, min_size=1, max_size=4), unlucky=st.integers(2, 9))
def check_any_pool(limits, questions, unlucky):
    """The answers of a core with little room, every few of whose steps do not fit, are those of roomy cores."""
    steps = count()
    fits = FaultyRunner(toy_runner(limits, TwoWays()), lambda plan: plan.num_tokens < 2 or next(steps) % unlucky)
    core = toy_core(limits, runner=fits)
    core.add_requests(NewRequest(index, *question) for index, question in enumerate(questions))
    outputs = finish(core)
    assert core.stats().kv_blocks_used == core.stats().swap_blocks_used == 0
    for index, question in enumerate(questions):
        roomy_limits = toy_limits(max_num_seqs=9, max_model_len=24)
        roomy = toy_core(roomy_limits, runner=toy_runner(roomy_limits, TwoWays()))
        roomy.add_requests([NewRequest(index, *question)])
        assert outputs[index].outputs == finish(roomy)[index].outputs
    seen.update(name for name in ("preemptions", "swaps", "cached_tokens") if getattr(core.stats(), name))


def test_searches_find_the_same_in_any_pool():
    check_any_pool()
    assert seen == {"preemptions", "swaps", "cached_tokens"}


def test_a_search_that_allows_few_tokens_has_fewer_beams():
    core = toy_search(toy_limits(), TwoWays(), beam_width=4, n=4, allowed_token_ids=[50, 60], ignore_eos=True)
    (output,) = finish(core).values()
    answers = [completion.token_ids for completion in output.outputs]
    assert len(set(answers)) == 4
    assert {token_id for answer in answers for token_id in answer} == {50, 60}


def test_a_search_in_which_nothing_may_follow_fails_by_name():
    core = toy_search(toy_limits(), TwoWays(), beam_width=2, allowed_token_ids=[EOS], min_tokens=1)
    (output,) = finish(core).values()
    assert output.error.code == "no_token_allowed"
    assert core.stats().kv_blocks_used == 0


def test_logits_that_are_not_numbers_end_the_search_with_an_error():
    class Broken(TwoWays):
        steps = 0

        def logits(self, hidden):
            self.steps += 1
            return super().logits(hidden) * (math.nan if self.steps == 4 else 1)

    (output,) = finish(toy_search(toy_limits(), Broken(), beam_width=3)).values()
    assert output.error.code == "nan_logits"


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_an_aborted_search_comes_back_with_its_beams(steps):
    core = toy_search(toy_limits(), TwoWays(), beam_width=3, n=3, ignore_eos=True)
    for _ in range(steps):
        core.step()
    core.abort(0)
    (output,) = finish(core).values()
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert {len(completion.token_ids) for completion in output.outputs} == {steps}
    assert core.stats().kv_blocks_used == 0
