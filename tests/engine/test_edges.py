"""The edges: parameters that mean nothing or leave one token, the shortest prompts, the smallest engines."""

import pytest
import torch
from transformers import LlamaForCausalLM

from engine import LLM, SamplingParams, StructuredOutput
from tests.engine.models_fixture import tiny_llama

LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)


def engine(folder, **options):
    return LLM(str(folder), dtype="float32", num_threads=1, **{"num_kv_blocks": 129, "block_size": 16, **options})


@pytest.fixture(scope="module")
def llm(folder):
    return engine(folder)


def prompt(length):
    return [(37 * place + length) % 250 for place in range(length)]


def answers(llm, params, prompts=None):
    outputs = llm.generate(prompts or [prompt(length) for length in LENGTHS], params)
    assert {output.error for output in outputs} == {None}
    return [[one.token_ids for one in output.outputs] for output in outputs]


def sampled(**params):
    return SamplingParams(**{"seed": 4, "temperature": 0.8, "max_tokens": 12, "ignore_eos": True, **params})


GREEDY = sampled(temperature=0)


@pytest.mark.parametrize(
    "off",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 320},
        {"top_k": 10**6},
        {"top_p": 1},
        {"top_p": 1.0},
        {"min_p": 0},
        {"repetition_penalty": 1},
        {"presence_penalty": 0, "frequency_penalty": -0.0},
        {"logit_bias": {}},
        {"bad_words": [], "stop": [], "stop_token_ids": []},
        {"allowed_token_ids": list(range(320))},
        {"min_tokens": 0},
        {"best_of": 1},
        {"logprobs": 5},
    ],
    ids=str,
)
def test_a_value_that_means_off_changes_no_draw(llm, off):
    assert answers(llm, sampled(**off)) == answers(llm, sampled())


@pytest.mark.parametrize(
    "one_token",
    [
        {"temperature": 1e-6},
        {"temperature": 5e-324},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 0, "top_k": 5, "top_p": 0.3, "min_p": 0.2},
    ],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(llm, one_token):
    assert answers(llm, sampled(**one_token)) == answers(llm, GREEDY)
    assert answers(llm, sampled()) != answers(llm, GREEDY)


@pytest.fixture(scope="module")
def expected(folder):
    """Transformers' greedy answers."""
    reference = LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = []
    for length in LENGTHS:
        ids = torch.tensor([prompt(length)])
        output = reference.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        tokens.append([tuple(output[0, length:].tolist())])
    return tokens


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1}, {"block_size": 4}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 1}],
    ids=str,
)
def test_prompts_of_one_token_and_of_whole_blocks_are_answered_as_by_transformers(folder, expected, options):
    llm = engine(folder, **{"num_kv_blocks": 1025, **options})
    assert answers(llm, GREEDY) == expected
    assert answers(llm, GREEDY) == expected, "and again, from the cache"
    assert llm.stats().cached_tokens > 0


KINDS = {
    "greedy": GREEDY,
    "several": sampled(n=4),
    "the best of several": sampled(n=2, best_of=4),
    "beams": SamplingParams(temperature=0, beam_width=4, n=4, max_tokens=12),
    "a grammar": sampled(n=3, structured_output=StructuredOutput(regex="[a-z]{12}")),
    "logprobs": sampled(n=2, logprobs=2, prompt_logprobs=2),
    "rules": sampled(repetition_penalty=1.3, min_tokens=6, stop=["a", "b"], bad_words=["c"], frequency_penalty=0.5),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_smallest_engine_gives_every_kind_of_answer(folder, llm, name):
    # One row at a time, a token a step, a token a block, and no block more than one sequence needs.
    smallest = engine(
        folder, max_num_seqs=1, max_num_batched_tokens=1, block_size=1, num_kv_blocks=30, max_model_len=29
    )
    prompts = [prompt(length) for length in (1, 4, 17)]
    assert answers(smallest, KINDS[name], prompts) == answers(llm, KINDS[name], prompts)
    assert smallest.stats().kv_blocks_used == 0
