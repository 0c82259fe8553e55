"""Requests of every kind at random, in engines with little room: each is answered as it is alone.

One tiny Llama whose last token is poisoned: in a prompt, or drawn, it makes everything after it NaN. What an engine has
room for is drawn as well, and every few steps do not fit its memory. Each answer, logprobs and vectors included, is
compared with that of a roomy engine which has nothing else to do.
"""

from collections import Counter
from itertools import count
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.loader import load
from engine.messages import NewRequest
from tests.engine.late_device import LateDevice, overlapped
from tests.engine.lora_fixture import write_adapter
from tests.engine.mixes import MAX_MODEL_LEN, Ask, check_answer, draw_ask
from tests.engine.models_fixture import poison, tiny_llama
from tests.engine.toy import FaultyRunner

CPU = torch.device("cpu")
POISON = 319
NUM_ENGINES = 12


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


def draw(random):
    return draw_ask(random, 320, POISON, temperatures=[0.7, 1.2], num_adapters=2)


def engine(loaded, room, device):
    model = loaded.config
    block_bytes = room.options["block_size"] * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4
    config = EngineConfig(
        "tiny", max_model_len=MAX_MODEL_LEN, swap_space=room.num_host_blocks * block_bytes, **room.options
    )
    core = assemble_engine(config, loaded, CPU)
    if device:
        core = overlapped(core, device)
    steps = count(1)
    loop = core._loop
    loop._runner = FaultyRunner(loop._runner, lambda plan: plan.num_tokens < 2 or next(steps) % room.unlucky)
    return core


def run(world, room, asks, device=None):
    """Answers by index; the places in `asks` are the indices, and None stands for nothing asked.

    With a device that runs late, steps are launched ahead.
    """
    loaded, adapters, _ = world
    core = engine(loaded, room, device)
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


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_every_request_is_answered_as_it_is_alone(world, overlapped):
    seen = Counter()
    for seed in range(NUM_ENGINES):
        random = Random(seed)
        room, asks = draw_room(random), [draw(random) for _ in range(random.randint(4, 12))]
        outputs, stats = run(world, room, asks, LateDevice(seed) if overlapped else None)
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
