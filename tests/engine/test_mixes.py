"""Requests of every kind at random, in engines with little room: each is answered as it is alone.

One tiny Llama whose last token is poisoned: in a prompt, or drawn, it makes everything after it NaN. What an engine has
room for is drawn as well, and every few steps do not fit its memory. Each answer, logprobs and vectors included, is
compared with that of a roomy engine which has nothing else to do.
"""

from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine import EngineConfig, PoolingParams, SamplingParams, StructuredOutput
from engine.build import assemble_engine
from engine.loader import load
from engine.messages import NewRequest
from engine.outputs import PoolingOutput
from tests.engine.lora_fixture import write_adapter
from tests.engine.models_fixture import poison, tiny_llama
from tests.engine.toy import FaultyRunner

CPU = torch.device("cpu")
MAX_MODEL_LEN = 40
POISON = 319
NUM_ENGINES = 12
TOLERANCE = 1e-4


class Ask(NamedTuple):
    """One request, and after how many steps its asker gives up, if ever; `lora` is the number of an adapter."""

    prompt: Any
    params: SamplingParams | PoolingParams
    lora: int | None
    salt: bytes
    give_up_after: int | None


class Room(NamedTuple):
    """An engine's limits, and which of its steps do not fit the memory: one in so many."""

    options: dict[str, Any]
    num_host_blocks: int
    unlucky: int


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The model, its adapters' folders, and answers that are known already."""
    base = tiny_llama(tmp_path_factory.mktemp("llama"), tokenizer=True)
    assert poison(base) == POISON
    loaded = load(str(base), dtype=torch.float32, device=CPU)
    adapters = [str(write_adapter(tmp_path_factory.mktemp("adapter"), base, seed=seed)) for seed in (1, 2)]
    return loaded, adapters, {}


def draw_ask(random):
    prompt = draw_prompt(random)
    lora = random.choice([None, None, None, 0, 1])
    salt = random.choice([b"", b"", b"", b"other"])
    give_up_after = random.choice([0, 1, 2, 5, 20]) if random.random() < 0.15 else None
    return Ask(prompt, draw_params(random), lora, salt, give_up_after)


def draw_prompt(random):
    kind = random.random()
    if kind < 0.05:
        return random.choice(["", [], [320], [1] * MAX_MODEL_LEN, None])
    if kind < 0.15:
        return random.choice(["né 👍", [{"role": "user", "content": "x"}], [7, POISON, 7]])
    # Two beginnings and few tails, so that prompts often begin alike, and some end where a block ends.
    return [random.randint(1, 2)] * random.choice([0, 8, 15, 16]) + random.choices([3, 4], k=random.randint(1, 3))


def draw_params(random):
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
    fields["temperature"] = 0.0 if kind == "greedy" else random.choice([0.7, 1.2])
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


def draw_room(random):
    block_size = random.choice([1, 2, 4, 16])
    fewest = -(-MAX_MODEL_LEN // block_size) + 1
    options = {
        "block_size": block_size,
        "num_kv_blocks": fewest + random.choice([0, 1, fewest // 2, fewest]),
        "max_num_seqs": random.choice([1, 3, 6, 9]),
        "max_num_batched_tokens": random.choice([1, 7, 16, 64]),
        "enable_prefix_caching": random.random() < 0.7,
        "max_loras": random.choice([1, 2]),
    }
    return Room(options, random.choice([0, 3, 3 * fewest]), random.choice([3, 5, 1000]))


ROOMY = Room(
    {
        "block_size": 8,
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
        "max_loras": 1,
    },
    0,
    10**9,
)


def engine(loaded, room):
    model = loaded.config
    block_bytes = room.options["block_size"] * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    config = EngineConfig(
        "tiny", max_model_len=MAX_MODEL_LEN, swap_space=room.num_host_blocks * block_bytes, **room.options
    )
    core = assemble_engine(config, loaded, CPU)
    steps = count(1)
    core._runner = FaultyRunner(core._runner, lambda plan: plan.num_tokens < 2 or next(steps) % room.unlucky)
    return core


def run(world, room, asks):
    """Answers by index; the places in `asks` are the indices, and None stands for nothing asked."""
    loaded, adapters, _ = world
    core = engine(loaded, room)
    core.add_requests(
        NewRequest(index, ask.prompt, ask.params, ask.salt, None if ask.lora is None else adapters[ask.lora])
        for index, ask in enumerate(asks)
        if ask
    )
    outputs = []
    for step in range(5000):
        for index, ask in enumerate(asks):
            if ask and ask.give_up_after == step:
                core.abort(index)
        if not core.has_unfinished:
            break
        outputs += core.step()
        core.scheduler.check_integrity()
    assert not core.has_unfinished, "the engine does not come to an end"
    assert core.scheduler.tables.pool.references() == {}
    assert core.scheduler.tables.swap.pool.references() == {}
    assert len({output.index for output in outputs}) == len(outputs), "a request was answered twice"
    return {output.index: output for output in outputs}, core.stats()


def alone(world, index, ask):
    ask = ask._replace(give_up_after=None, salt=b"")
    key = (index, repr(ask))
    known = world[2]
    if key not in known:
        (known[key],) = run(world, ROOMY, [None] * index + [ask])[0].values()
    return known[key]


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


def test_every_request_is_answered_as_it_is_alone(world):
    seen = Counter()
    for seed in range(NUM_ENGINES):
        random = Random(seed)
        room, asks = draw_room(random), [draw_ask(random) for _ in range(random.randint(4, 12))]
        outputs, stats = run(world, room, asks)
        assert sorted(outputs) == list(range(len(asks))), seed
        for index, ask in enumerate(asks):
            expected = alone(world, index, ask)
            try:
                check_answer(outputs[index], expected, ask)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {room} answers the {index}th of {asks} in another way") from error
            seen[outputs[index].error.code if outputs[index].error else "an answer"] += 1
        for name in ("preemptions", "swaps", "cached_tokens", "lora_loads"):
            seen[name] += getattr(stats, name)
    assert {"preemptions", "swaps", "cached_tokens", "lora_loads", "nan_logits", "aborted", "invalid_grammar"} <= set(
        seen
    )


@pytest.mark.parametrize("num_host_blocks", [0, 200])
def test_stop_strings_are_found_in_text_from_before_and_after_a_preemption(world, num_host_blocks):
    letters = {"allowed_token_ids": list(range(64, 90)), "n": 5, "seed": 2, "max_tokens": 24}

    def answers(room, **params):
        outputs, stats = run(world, room, [Ask([1, 2, 3], SamplingParams(**letters, **params), None, b"", None)])
        return outputs[0].outputs, stats

    # Late, so that nearly all of the text is decoded token by token, and most of it before a preemption.
    stops = [one.text[17:23] for one in answers(ROOMY)[0]]
    expected, _ = answers(ROOMY, stop=stops)
    assert [(len(one.text), one.stop_reason) for one in expected] == [(17, stop) for stop in stops]
    tight = ROOMY.options | {"block_size": 1, "num_kv_blocks": MAX_MODEL_LEN + 5}
    found, stats = answers(Room(tight, num_host_blocks, 1000), stop=stops)
    assert found == expected
    assert stats.preemptions >= 4, "all but the first"
    assert bool(stats.swaps) == bool(num_host_blocks)
