"""Requests that cannot be served, of every kind in one batch: each gets its error, and the others their answers."""

import pytest

from engine import LLM, PoolingParams, SamplingParams, StructuredOutput
from engine.core import EngineCore
from engine.messages import NewRequest
from engine.outputs import PoolingOutput
from engine.pooling.prompts import TextPair
from tests.engine.models_fixture import tiny_llama

VOCAB_SIZE = 320
MAX_MODEL_LEN = 48
GREEDY = SamplingParams(temperature=0, max_tokens=6)
EMBED = PoolingParams()


def sampling(**params):
    return SamplingParams(**{"max_tokens": 6, **params})


def structured(**form):
    return sampling(structured_output=StructuredOutput(**form))


# What is asked, the code of the error, and the field that it names.
BAD = {
    "empty text": ("", GREEDY, "invalid_request", "prompt"),
    "no tokens": ([], GREEDY, "invalid_request", "prompt"),
    "no messages": ([], EMBED, "invalid_request", "prompt"),
    "a token outside of the vocabulary": ([1, VOCAB_SIZE], GREEDY, "invalid_request", "prompt"),
    "a token far outside of it": ([1, 2**80], GREEDY, "invalid_request", "prompt"),
    "a negative token": ([1, -1], EMBED, "invalid_request", "prompt"),
    "a token that is no integer": ([1, "2"], GREEDY, "invalid_request", "prompt"),
    "no prompt": (None, GREEDY, "invalid_request", "prompt"),
    "a number": (7, EMBED, "invalid_request", "prompt"),
    "a pair to generate from": (TextPair("a", "b"), GREEDY, "invalid_request", "prompt"),
    "a pair to embed": (TextPair("a", "b"), EMBED, "invalid_request", "prompt"),
    "text that is not Unicode": ("\ud800", GREEDY, "invalid_request", "prompt"),
    "a message without a role": ([{"content": "x"}], GREEDY, "invalid_request", "messages"),
    "a message that is none": ([{"role": "user", "content": "x"}, 5], GREEDY, "invalid_request", "messages"),
    "no room for an answer": ([1] * MAX_MODEL_LEN, GREEDY, "context_length_exceeded", "prompt"),
    "a long text": ("x" * 1000, sampling(n=3), "context_length_exceeded", "prompt"),
    "a long prompt to embed": ([1] * (MAX_MODEL_LEN + 1), EMBED, "context_length_exceeded", "prompt"),
    "a stop token that is none": ([1], sampling(stop_token_ids=[VOCAB_SIZE]), "invalid_request", "stop_token_ids"),
    "an allowed token that is none": (
        [1],
        sampling(allowed_token_ids=[5, VOCAB_SIZE]),
        "invalid_request",
        "allowed_token_ids",
    ),
    "a bias of a token that is none": ([1], sampling(logit_bias={VOCAB_SIZE: 1}), "invalid_request", "logit_bias"),
    "a pattern with look-around": ([1], structured(regex="a(?=b)"), "invalid_grammar", "structured_output.regex"),
    "a schema of no type": ([1], structured(json={"type": "x"}), "invalid_grammar", "structured_output.json"),
    "a grammar without rules": ([1], structured(grammar="root ::= ("), "invalid_grammar", "structured_output.grammar"),
    "nothing allowed": ([1], sampling(allowed_token_ids=[257], min_tokens=1), "no_token_allowed", None),
    "more dimensions than there are": ([1], PoolingParams(dimensions=65), "invalid_request", "dimensions"),
    "a score of a model without a head": (TextPair("a", "b"), PoolingParams(task="score"), "unsupported_task", "task"),
    "an adapter without a name": ([1], GREEDY, "invalid_lora", "lora"),
    "an adapter that is not there": ([1], GREEDY, "lora_not_found", "lora"),
}
LORA = {"an adapter without a name": "", "an adapter that is not there": "/no/such/adapter"}
GOOD = [
    ([1, 2, 3], GREEDY),
    ("text", sampling(seed=1, n=2)),
    ([1, 2], structured(choice=["yes", "no"])),
    ([1, 2, 3], sampling(temperature=0, beam_width=2)),
    ([3, 2, 1], EMBED),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)
    return LLM(
        str(path),
        dtype="float32",
        num_threads=1,
        block_size=4,
        num_kv_blocks=65,
        max_num_seqs=16,
        max_model_len=MAX_MODEL_LEN,
        max_loras=1,
    )


def ask(core: EngineCore, requests):
    core.add_requests(requests)
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
        core.scheduler.check_integrity()
    assert core.stats().kv_blocks_used == 0
    assert len(outputs) == len(requests)
    return {output.index: output for output in outputs}


def contents(output):
    assert output.error is None
    return output.data.tolist() if isinstance(output, PoolingOutput) else output.outputs


def test_bad_requests_get_their_errors_and_their_neighbours_their_answers(llm):
    expected = [
        contents(ask(llm._core, [NewRequest(place, prompt, params)])[place])
        for place, (prompt, params) in enumerate(GOOD)
    ]
    requests = []
    for place, (name, (prompt, params, _, _)) in enumerate(BAD.items()):
        requests.append(NewRequest(100 + place, prompt, params, lora=LORA.get(name)))
        # Each good one several times, between the bad ones; with its own index, of which its noise is a function.
        if place < len(GOOD):
            requests.append(NewRequest(place, *GOOD[place]))
    outputs = ask(llm._core, requests)
    for place, (name, (_, _, code, field)) in enumerate(BAD.items()):
        output = outputs[100 + place]
        assert output.error, name
        assert (name, output.error.code, output.error.field) == (name, code, field)
        if not isinstance(output, PoolingOutput):
            assert output.outputs[0].finish_reason == "error"
    assert [contents(outputs[place]) for place in range(len(GOOD))] == expected


EXTREMES = [
    {"seed": -(2**63)},
    {"seed": 2**63 - 1, "n": 3},
    {"top_k": 2**70},
    {"max_tokens": 2**70},
    {"max_tokens": None, "min_tokens": 2**70},
    {"temperature": 5e-324},
    {"temperature": 1e300},
    {"top_p": 5e-324},
    {"min_p": 5e-324},
    {"min_p": 1.0},
    {"repetition_penalty": 1000.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -100.0)},
    {"allowed_token_ids": list(range(VOCAB_SIZE)) * 2},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"stop": [chr(500 + place) * 9 for place in range(1000)]},
    {"n": 40, "best_of": 50},
    {"temperature": 0, "beam_width": 64, "n": 64},
    {"temperature": 0, "beam_width": 2, "length_penalty": -10.0},
]


@pytest.mark.parametrize("params", EXTREMES, ids=str)
def test_extremes_that_are_allowed_are_served(llm, params):
    asked = sampling(**{"ignore_eos": True, **params})
    output = ask(llm._core, [NewRequest(0, [1, 2, 3], asked)])[0]
    assert output.error is None
    assert len(output.outputs) == asked.n
    most = MAX_MODEL_LEN - 3 if asked.max_tokens is None else min(asked.max_tokens, MAX_MODEL_LEN - 3)
    assert {len(one.token_ids) for one in output.outputs} == {most}
