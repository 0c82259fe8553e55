"""Which adapters are in memory, and who waits for them: the loop with a toy model and adapters of nothing."""

import random
import threading
from collections import Counter

import pytest
import torch

from engine.adapter_slots import AdapterSlots
from engine.device import CpuDevice
from engine.errors import RequestError
from engine.lora import FileStamp, LoadedAdapter, LoraCache
from engine.messages import NewRequest
from engine.sampling.params import SamplingParams
from kernels.linear import plain_linear
from kernels.lora import packed_lora
from tests.engine.toy import answer, request, toy_core, toy_limits, toy_runner

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def adapter_of(name, *, files=()):
    return LoadedAdapter(name.encode(), files, {"name": name})


class WatchingRunner:
    """Runs steps, and notes the adapters of each."""

    def __init__(self, limits):
        slots = AdapterSlots({}, packed_lora(plain_linear), CpuDevice(), num_slots=8, max_rank=1, dtype=torch.float32)
        self._runner = toy_runner(limits, adapters=slots)
        self.steps = []
        self.slots = {}

    def put(self, slot, factors):
        self.slots[slot] = factors["name"]

    def move_blocks(self, moves):
        self._runner.move_blocks(moves)

    def execute(self, plan):
        adapters = {row.sequence.request.lora: row.sequence.request.adapter for row in plan.rows}
        for name, adapter in adapters.items():
            assert (adapter and adapter.revision.decode()) == name, "a row runs without its adapter"
            assert adapter is None or self.slots[adapter.slot] == name, "its slot holds another"
        self.steps.append(set(adapters) - {None})
        return self._runner.execute(plan)


class Engine:
    """A toy engine whose adapters come from `load`."""

    def __init__(self, load=adapter_of, *, max_loras=2, max_overtakes=100, **limits):
        limits = toy_limits(**limits)
        self.runner = WatchingRunner(limits)
        self.cache = LoraCache(load, self.runner.put, max_loras=max_loras, max_overtakes=max_overtakes)
        self.core = toy_core(limits, runner=self.runner, adapters=self.cache)
        self.outputs = {}

    def add(self, *names, first=0, params=GREEDY):
        self.core.add_requests(
            NewRequest(index, [index % 250 + 1, 3], params, lora=name) for index, name in enumerate(names, first)
        )

    def step(self):
        new = {output.index: output for output in self.core.step()}
        self.outputs |= new
        self.core.scheduler.check_integrity()
        return new

    def finish(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.core.has_unfinished:
                return
            self.step()
        raise AssertionError("the loop does not come to an end")

    def check_answers(self):
        for index, output in self.outputs.items():
            assert output.error is None
            assert list(output.outputs[0].token_ids) == answer([index % 250 + 1, 3], 4, ignore_eos=True)


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_never_are_more_adapters_in_a_step_than_may_be_in_memory(max_loras):
    engine = Engine(max_loras=max_loras, scheduling_policy="fcfs")
    engine.add(*["a", "b", None, "c", "d", "a", "c", None, "b", "d"] * 4)
    engine.finish()
    assert len(engine.outputs) == 40
    engine.check_answers()
    assert max(map(len, engine.runner.steps)) == max_loras


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_everybody_is_answered(seed):
    rng = random.Random(seed)

    def load(name):
        if name == "broken":
            raise RequestError("nothing there", code="lora_not_found", field="lora")
        return adapter_of(name)

    engine = Engine(
        load,
        max_loras=rng.randint(1, 3),
        max_overtakes=rng.choice([0, 1, 5]),
        max_num_seqs=rng.randint(1, 6),
        num_kv_blocks=rng.choice([6, 65]),
        max_model_len=20,
    )
    names = rng.choices([None, "a", "b", "c", "d", "broken"], k=40)
    aborted = set()
    for index, name in enumerate(names):
        engine.add(name, first=index)
        if rng.random() < 0.5:
            engine.step()
        if rng.random() < 0.1:
            aborted.add(victim := rng.randint(0, index))
            engine.core.abort(victim)
    engine.finish()
    assert sorted(engine.outputs) == list(range(40))
    for index, name in enumerate(names):
        output = engine.outputs.pop(index)
        if index in aborted and output.outputs[0].finish_reason == "abort":
            continue
        if name == "broken":
            assert output.error.code == "lora_not_found"
        else:
            engine.outputs[index] = output
    engine.check_answers()


def test_the_least_recently_used_adapter_makes_room():
    loads = Counter()

    def load(name):
        loads[name] += 1
        return adapter_of(name)

    engine = Engine(load)
    for index, name in enumerate(["a", "b", "a", "c", "a", "b"]):
        engine.add(name, first=index)
        engine.finish()
    assert loads == {"a": 1, "b": 2, "c": 1}
    assert (engine.cache.num_loads, engine.cache.num_evictions) == (4, 2)


def test_others_go_on_while_an_adapter_is_loaded():
    loaded = threading.Event()

    def load(name):
        assert loaded.wait(60)
        return adapter_of(name)

    engine = Engine(load)
    engine.add("a", None, "a", None)
    while len(engine.outputs) < 2:
        engine.step()
    assert sorted(engine.outputs) == [1, 3]
    loaded.set()
    engine.finish()
    engine.check_answers()
    assert engine.cache.num_loads == 1


def test_a_loop_with_nothing_else_to_do_sleeps_until_the_adapter_is_there():
    loaded = threading.Event()

    def load(name):
        assert loaded.wait(60)
        return adapter_of(name)

    engine = Engine(load)
    waits = []
    wait = engine.cache.wait

    def watch(seconds):
        waits.append(seconds)
        loaded.set()
        wait(60)

    engine.cache.wait = watch
    engine.add("a")
    engine.finish()
    assert len(waits) == 1
    engine.check_answers()


def test_a_request_that_waits_for_a_slot_is_overtaken_only_so_often():
    engine = Engine(max_loras=1, max_overtakes=6, max_num_seqs=8, scheduling_policy="fcfs")
    # One a step, of four tokens each: there is never a moment without a holder of "a".
    for step in range(12):
        engine.add("a", first=step)
        engine.step()
    engine.add("b", first=50)
    for step in range(100, 200):
        if 50 in engine.outputs:
            break
        engine.add("a", first=step)
        engine.step()
    overtook = [index for index in engine.outputs if index >= 100]
    assert 50 in engine.outputs, "the request for b starves"
    assert len(overtook) == 6
    engine.finish()
    engine.check_answers()


def test_requests_of_one_adapter_overtake_so_that_alternating_ones_do_not_run_alone():
    engine = Engine(max_loras=1, max_num_seqs=4)
    engine.add(*["a", "b"] * 4)
    engine.finish()
    assert engine.cache.num_loads == 2
    engine.check_answers()


def test_the_end_of_a_request_that_waits_for_a_slot_lets_the_others_go_on():
    engine = Engine(max_loras=1, max_overtakes=0, max_num_seqs=2)
    engine.add("a", "b", "a", "a")
    while not engine.runner.steps:
        engine.step()
    assert not engine.outputs
    engine.core.abort(1)
    engine.finish()
    assert engine.outputs.pop(1).outputs[0].finish_reason == "abort"
    assert engine.cache.num_loads == 1
    engine.check_answers()


def test_the_end_of_a_request_whose_adapter_is_being_loaded_changes_nothing_for_the_others():
    loaded = threading.Event()

    def load(name):
        assert loaded.wait(60)
        raise RequestError("nothing there", code="lora_not_found", field="lora")

    engine = Engine(load)
    engine.add("a", "a", None)
    engine.step()
    engine.core.abort(0)
    loaded.set()
    engine.finish()
    assert engine.outputs.pop(0).outputs[0].finish_reason == "abort"
    assert engine.outputs.pop(1).error.code == "lora_not_found"
    engine.check_answers()


def test_a_failed_load_fails_those_who_waited_and_is_tried_again_for_who_comes_later():
    attempts = Counter()

    def load(name):
        attempts[name] += 1
        if name == "a" and attempts[name] == 1:
            raise RequestError("nothing there", code="lora_not_found", field="lora")
        return adapter_of(name)

    engine = Engine(load, max_loras=1)
    engine.add("a", "b", None, "a")
    engine.finish()
    errors = {index: output.error and output.error.code for index, output in engine.outputs.items()}
    assert errors == {0: "lora_not_found", 1: None, 2: None, 3: "lora_not_found"}
    engine.outputs.clear()
    engine.add("a", first=10)
    engine.finish()
    engine.check_answers()
    assert attempts == {"a": 2, "b": 1}


def test_a_fault_that_is_no_request_error_ends_the_loop():
    def load(name):
        raise ZeroDivisionError

    engine = Engine(load)
    engine.add("a")
    with pytest.raises(ZeroDivisionError):
        engine.finish()


def test_a_changed_file_is_read_again_once_nobody_holds_the_adapter(tmp_path):
    file = tmp_path / "adapter"
    file.write_text("one")

    def load(name):
        stamp = FileStamp.of(file)
        return LoadedAdapter(file.read_bytes(), (stamp,), {})

    cache = LoraCache(load, lambda slot, factors: None, max_loras=1, max_overtakes=0)

    def acquire(made):
        if not cache.acquire(made):
            cache.wait(60)
            assert cache.take_loaded() == []
            assert cache.acquire(made)
        return made.adapter.revision

    first, second, third = (asking(index, "a") for index in range(3))
    assert acquire(first) == b"one"
    file.write_text("three")
    assert acquire(second) == b"one"
    cache.release(first)
    cache.release(second)
    assert acquire(third) == b"three"
    cache.release(third)
    file.unlink()
    assert not cache.acquire(asking(3, "a"))


def asking(index, name):
    made = request(index, [1, 2])
    made.lora = name
    return made
