"""Logprobs against Transformers' log-softmax: of answers and prompts, in chunks, preempted, of several choices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from engine import LLM, SamplingParams
from engine.batch import SamplingBatch
from engine.device import CpuDevice
from engine.plan import PlanRow
from engine.sampling.prompt_logprobs import compute_prompt_logprobs, read_prompt_logprobs, wanted_tokens
from engine.sampling.sampler import read_draws, sample
from kernels import logprobs_cpu, reference_sampling
from tests.engine.models_fixture import tiny_llama
from tests.engine.toy import request

# Of logits that are float32 sums in another order.
TOLERANCE = 2e-5

KERNELS = [reference_sampling, logprobs_cpu]

# Few values, so that most are equal to others.
rows_with_ties = st.lists(st.integers(-3, 3).map(float), min_size=12, max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(rows_with_ties, min_size=1, max_size=4), count=st.integers(0, 14), kernels=st.sampled_from(KERNELS)
)
def test_the_likeliest_are_in_falling_order_and_of_equals_the_first(rows, count, kernels):
    values, indices = kernels.likeliest(torch.tensor(rows), count)
    for row, row_values, row_indices in zip(rows, values.tolist(), indices.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
        assert row_indices == expected
        assert row_values == [row[index] for index in expected]


@pytest.mark.parametrize("kernels", KERNELS)
def test_where_logits_are_no_numbers_the_choice_stays_within_the_vocabulary(kernels):
    token_ids = kernels.likeliest(torch.full((1, 7), math.nan), 3).token_ids
    assert {0 <= token_id < 7 for token_id in token_ids.flatten().tolist()} == {True}


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_rank_counts_the_tokens_that_are_likelier_so_that_equals_share_it(kernels):
    logits = torch.tensor([[-1.0, -2.0, -1.0, -3.0, -2.0]]).repeat(5, 1)
    ranks = kernels.token_logprobs(logits, torch.arange(5), 0).ranks.tolist()
    assert ranks == [1, 3, 1, 5, 3]


@pytest.mark.parametrize("tied", [[3], [3, 5], [0, 3, 5, 11]])
def test_a_greedy_token_among_equals_is_the_first_of_the_likeliest_and_of_rank_one(tied):
    logits = torch.zeros(1, 12)
    logits[0, tied] = 4.0
    logits[0, 7] = 2.0
    batch = SamplingBatch([0.0], [0], [1.0], [0.0], [1], [0], num_logprobs={0: 12})
    device = CpuDevice()
    (drawn,) = read_draws(batch, device.download(lambda: sample(logits, batch, device).tensors()).wait())
    entry = drawn.logprobs
    assert (drawn.token_id, entry.token_id, entry.rank) == (tied[0], tied[0], 1)
    assert [token_id for token_id, _ in entry.top[: len(tied) + 1]] == [*tied, 7]
    assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1, abs=1e-6)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def reference(model_path):
    return LlamaForCausalLM.from_pretrained(model_path).eval()


def engine(model_path, **options):
    return LLM(str(model_path), dtype="float32", num_threads=1, **options)


def expected_log_probs(reference, token_ids):
    """`[n - 1, vocab_size]`: row i is about token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0, :-1].float(), -1)


def check_entries(entries, log_probs, token_ids, num_top):
    """Public entries, one for each row of `log_probs`."""
    assert [entry.token_id for entry in entries] == list(token_ids)
    for entry, row in zip(entries, log_probs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TOLERANCE)
        assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= int(
            ((row - row[entry.token_id]).abs() < TOLERANCE).sum() - 1
        )
        assert len(entry.top) == num_top
        for place, (alternative, value) in enumerate(zip(entry.top, row.topk(num_top).values.tolist(), strict=True)):
            assert alternative.logprob == pytest.approx(value, abs=TOLERANCE)
            assert alternative.logprob == pytest.approx(row[alternative.token_id].item(), abs=TOLERANCE)
            assert (alternative.rank, alternative.top) == (place + 1, ())


def check_output(output, reference, num_top, num_prompt_top):
    prompt = list(output.prompt_token_ids)
    for completion in output.outputs:
        everything = prompt + list(completion.token_ids)
        log_probs = expected_log_probs(reference, everything)
        check_entries(completion.logprobs, log_probs[len(prompt) - 1 :], completion.token_ids, num_top)
        assert completion.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in completion.logprobs))
        first, *others = output.prompt_logprobs
        assert first is None
        check_entries(others, log_probs[: len(prompt) - 1], prompt[1:], num_prompt_top)


def prompts(count, length=41):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, length), generator=generator).tolist()


WANTED = SamplingParams(temperature=0.8, top_k=20, max_tokens=9, logprobs=3, prompt_logprobs=2, seed=1, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16 tokens"),
        pytest.param({"max_num_batched_tokens": 7, "block_size": 4, "enable_prefix_caching": False}, id="chunks of 7"),
    ],
)
def test_logprobs_are_those_of_transformers(model_path, reference, options):
    for output in engine(model_path, **options).generate(prompts(4), WANTED):
        check_output(output, reference, 3, 2)


def test_a_prompt_of_one_token_has_nothing_to_say(model_path):
    (output,) = engine(model_path).generate([[65]], WANTED)
    assert output.prompt_logprobs == (None,)


def test_prompt_logprobs_are_complete_where_the_prompt_is_cached(model_path, reference):
    llm = engine(model_path, block_size=4)
    first, second, plain = llm.generate(prompts(1) * 2, WANTED) + llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=1)
    )
    assert (first.num_cached_tokens, second.num_cached_tokens, plain.num_cached_tokens) == (0, 0, 40)
    check_output(second, reference, 3, 2)


def test_a_prompt_that_is_computed_anew_adds_only_what_is_lacking():
    asked = request(0, [3, 1, 4, 1, 5, 9], prompt_logprobs=1)
    (sequence,) = asked.sequences
    # The hidden state of a token is its own number, and makes the next number the likeliest.
    hidden = torch.tensor(asked.prompt_token_ids)[:, None]

    def logits(states):
        return torch.nn.functional.one_hot(states[:, 0] + 1, 12).float()

    def prompt_logprobs(hidden, rows):
        wanted = wanted_tokens(rows)
        tensors = compute_prompt_logprobs(hidden, wanted, logits, CpuDevice())
        return read_prompt_logprobs(wanted, [tensor.numpy() for tensor in tensors])

    (first,) = prompt_logprobs(hidden[:3], [PlanRow(sequence, 0, 3, 0)]).values()
    asked.prompt_logprobs.extend(first)
    rows = [PlanRow(sequence, 0, 4, 0), PlanRow(sequence, 0, 6, 1)]
    anew = prompt_logprobs(torch.cat([hidden[:4], hidden]), rows)
    assert [[entry.token_id for entry in entries] for entries in (first, anew[0], anew[1])] == [[1, 4, 1], [5], [5, 9]]
    assert [entry.top[0][0] for entry in (*first, *anew[1])] == [4, 2, 5, 2, 6]


def test_after_preemption_nothing_is_there_twice(model_path, reference):
    options = {"num_kv_blocks": 17, "block_size": 4, "max_model_len": 60, "max_num_batched_tokens": 16}
    llm = engine(model_path, **options)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    # Short answers first, so that admission expects such, and then too many that are longer.
    llm.generate([[1]] * 60, SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(320))))
    outputs = llm.generate(prompts(5, length=20), params)
    assert llm.stats().preemptions > 0
    for output in outputs:
        assert len(output.outputs[0].logprobs) == 16
        check_output(output, reference, 1, 1)


def test_several_choices_have_logprobs_of_their_own_and_the_prompts_once(model_path, reference):
    llm = engine(model_path, max_num_batched_tokens=16)
    params = SamplingParams(n=4, max_tokens=6, logprobs=2, prompt_logprobs=0, seed=3, ignore_eos=True)
    for output in llm.generate(prompts(2), params):
        assert len({completion.token_ids for completion in output.outputs}) == 4
        check_output(output, reference, 2, 0)


def test_requests_that_do_not_ask_get_none(model_path):
    (output,) = engine(model_path).generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)


def test_entries_carry_each_tokens_text_and_bytes(model_path):
    llm = engine(model_path)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=5, temperature=0)
    (output,) = llm.generate(["né"], params)
    _, *others = output.prompt_logprobs
    assert [(entry.text, entry.utf8) for entry in others] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9")]
    for entry in output.outputs[0].logprobs[0].top:
        assert entry.text == llm.tokenizer.decode([entry.token_id])
        assert entry.utf8.decode(errors="replace") == entry.text
