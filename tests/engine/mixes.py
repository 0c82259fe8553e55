"""Requests of every kind, drawn at random, and what their answers have to agree in."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine import PoolingParams, SamplingParams, StructuredOutput
from engine.outputs import PoolingOutput

MAX_MODEL_LEN = 40
TOLERANCE = 1e-4


class Ask(NamedTuple):
    """One request, and after how many steps its asker gives up, if ever; `lora` is the number of an adapter."""

    prompt: Any
    params: SamplingParams | PoolingParams
    lora: int | None
    salt: bytes
    give_up_after: int | None


def draw_ask(random, vocab_size, poison, *, temperatures, num_adapters=0):
    prompt = draw_prompt(random, vocab_size, poison)
    lora = random.choice([None, None, None, *range(num_adapters)])
    salt = random.choice([b"", b"", b"", b"other"])
    give_up_after = random.choice([0, 1, 2, 5, 20]) if random.random() < 0.15 else None
    return Ask(prompt, draw_params(random, temperatures), lora, salt, give_up_after)


def draw_prompt(random, vocab_size, poison):
    kind = random.random()
    if kind < 0.05:
        return random.choice(["", [], [vocab_size], [1] * MAX_MODEL_LEN, None])
    if kind < 0.15:
        return random.choice(["né 👍", [{"role": "user", "content": "x"}], [7, poison, 7]])
    # Two beginnings and few tails, so that prompts often begin alike, and some end where a block ends.
    return [random.randint(1, 2)] * random.choice([0, 8, 15, 16]) + random.choices([3, 4], k=random.randint(1, 3))


def draw_params(random, temperatures):
    kind = random.choice(["greedy", "sampled", "several", "best of", "grammar", "beams", "pooled"])
    if kind == "pooled":
        return PoolingParams(pooling=random.choice(["mean", "cls", "last"]), normalize=random.random() < 0.5)
    # A request has none of the rules, or a few.
    fields = some(random, RULES) if random.random() < 0.6 else {}
    if kind == "beams":
        width = random.randint(1, 4)
        early_stopping = random.choice([False, True, "never"])
        fields |= {"beam_width": width, "n": random.randint(1, width), "early_stopping": early_stopping}
        return SamplingParams(temperature=0, max_tokens=12, **fields)
    fields |= some(random, ANSWER_RULES) if random.random() < 0.6 else {}
    fields |= {"max_tokens": random.choice([12, 20, 24, None]), "seed": random.choice([None, 0, 1])}
    fields["temperature"] = 0.0 if kind == "greedy" else random.choice(temperatures)
    if kind == "sampled":
        fields |= some(random, {"top_p": [0.8], "top_k": [-1, 9], "min_p": [0.1]})
    if kind in ("several", "grammar"):
        fields["n"] = random.randint(1, 5)
    if kind == "best of":
        fields |= {"n": random.randint(1, 2), "best_of": random.randint(2, 4)}
    if kind == "grammar":
        fields["structured_output"] = random.choice(GRAMMARS)
    return SamplingParams(**fields)


def some(random, choices):
    return {name: random.choice(values) for name, values in choices.items() if random.random() < 0.4}


RULES = {
    "repetition_penalty": [0.8, 1.3],
    "presence_penalty": [-1.0, 1.5],
    "frequency_penalty": [0.7],
    "logit_bias": [{5: 3.0, 6: -100.0}],
    "bad_words": [["a", "e f"]],
    "allowed_token_ids": [list(range(64, 230))],
    "prompt_logprobs": [0, 1, 2],
    "ignore_eos": [True],
    "stop_token_ids": [[101, 140, 200]],
}
ANSWER_RULES = {
    "logprobs": [0, 1, 3],
    "stop": [["a", "bc", "é"], "x"],
    "include_stop_str_in_output": [True],
    "min_tokens": [1, 6],
}
GRAMMARS = [
    StructuredOutput(regex="[a-z]{2,}"),
    StructuredOutput(regex="(ab|cd){1,8}e"),
    StructuredOutput(choice=["yes", "no", "näher"]),
    StructuredOutput(json_object=True),
    StructuredOutput(regex="a(?=b)"),
]


def check_answer(found, expected, ask):
    given_up = ask.give_up_after is not None
    if isinstance(found, PoolingOutput):
        if not (given_up and found.error and found.error.code == "aborted"):
            assert found.prompt_token_ids == expected.prompt_token_ids
            assert described(found.error) == described(expected.error)
            np.testing.assert_allclose(found.data, expected.data, rtol=1e-5, atol=1e-5)
    elif given_up and "abort" in {one.finish_reason for one in found.outputs}:
        check_beginnings(found, expected, seeded_in_order=keeps_order(ask.params))
    elif expected.error:
        # How far it came by then is another matter: siblings, and chunks, fail with it.
        assert described(found.error) == described(expected.error)
    else:
        assert found.error is None
        assert without_logprobs(found) == without_logprobs(expected)
        check_entries(found.prompt_logprobs, expected.prompt_logprobs)
        for one, other in zip(found.outputs, expected.outputs, strict=True):
            check_entries(one.logprobs, other.logprobs)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=TOLERANCE)


def keeps_order(params):
    """Whether the answers stand in the order of their seeds, from the first token on."""
    return params.beam_width is None and params.best_of is None


def described(error):
    return error and (error.code, error.field)


def without_logprobs(output):
    completions = tuple(replace(one, logprobs=None, cumulative_logprob=None) for one in output.outputs)
    return replace(output, outputs=completions, prompt_logprobs=None, num_cached_tokens=0, error=None)


def check_beginnings(found, expected, *, seeded_in_order):
    """What an aborted request has is the beginning of what it would have been. Beams change places until the end."""
    if found.prompt_logprobs and not expected.error:
        check_entries(found.prompt_logprobs, expected.prompt_logprobs[: len(found.prompt_logprobs)])
    if seeded_in_order:
        for one, whole in zip(found.outputs, expected.outputs, strict=False):
            length = min(len(one.token_ids), len(whole.token_ids)) if expected.error else len(one.token_ids)
            assert one.token_ids[:length] == whole.token_ids[:length]


def check_entries(found, expected):
    """Sums in another order differ in their last digits, and so may the ranks of tokens that are nearly as likely."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or (), expected or (), strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert (one.token_id, one.utf8) == (other.token_id, other.utf8)
        assert abs(one.rank - other.rank) <= 1
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=TOLERANCE)
