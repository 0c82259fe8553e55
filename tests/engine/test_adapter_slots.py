"""Adapters in stacked slots, as a GPU has them: the same tokens, in stream order, and in graphs."""

from itertools import cycle

import pytest
import torch

from engine import LLM, SamplingParams
from engine.adapter_slots import AdapterSlots
from engine.capacity import kv_capacity
from engine.config import EngineConfig
from engine.device import CpuDevice
from engine.graphs import DecodeGraphs
from engine.loader import load
from engine.loader.peft import PeftLoader, adapter_shapes, adapter_targets
from engine.loop import OverlappedLoop
from engine.lora import LoraCache
from engine.messages import NewRequest
from kernels import reference, torch_attention
from kernels.linear import plain_linear
from kernels.lora import LoraShape, LowRank, packed_lora
from kernels.ops import GraphPlans, allocate_kv_cache
from kernels.triton import lora as triton_lora
from tests.engine.families import FAMILY_CASES, SMALL, random_model
from tests.engine.kernel_tables import STACKED_LORA, use_kernels
from tests.engine.late_device import LateDevice, row_runner
from tests.engine.lora_fixture import ATTENTION, write_adapter
from tests.engine.models_fixture import tiny_llama
from tests.engine.test_graphs import LengthsOnTheDevice
from tests.engine.toy import toy_core, toy_limits

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [200, 7, 7], [42, 17, 99, 3, 12]]
CAPTURED = {
    "write_qkv": reference.write_qkv,
    "plan_attention": torch_attention.plan_attention,
    "paged_attention": LengthsOnTheDevice.attend,
    "graph_plans": GraphPlans(lambda kv: True, LengthsOnTheDevice.reserve, LengthsOnTheDevice.refill),
}


def params(max_tokens=12):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Of different ranks, and one that leaves projections alone."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        str(write_adapter(folder / "all", base, seed=1)),
        str(write_adapter(folder / "attention", base, seed=2, linears=ATTENTION, r=16, lora_alpha=24)),
        str(write_adapter(folder / "two", base, seed=3, linears=("v_proj", "up_proj"), r=1, lora_alpha=3)),
    ]


def answers(base, loras, *, max_tokens=12, **options):
    """What an engine says to each prompt with each adapter, all of them in one batch as far as there are slots."""
    options = {"num_kv_blocks": 128, "block_size": 4, "max_num_seqs": 16, "max_loras": 3, **options}
    llm = LLM(str(base), dtype="float32", device="cpu", model_impl="native", **options)
    prompts = [prompt for prompt in PROMPTS for _ in loras]
    outputs = llm.generate(prompts, params(max_tokens), lora=loras * len(PROMPTS))
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(base, adapters):
    """The tokens of an engine that adds adapters one by one: by prompt, and then by adapter, none among them."""
    found = answers(base, [*adapters, None])
    assert len(set(found)) == len(found), "adapters that make no difference"
    return found


@pytest.mark.parametrize("max_loras", [1, 2, 3, 5])
def test_stacked_adapters_give_the_tokens_of_those_that_are_added_one_by_one(
    base, adapters, expected, monkeypatch, max_loras
):
    use_kernels(monkeypatch, lora=STACKED_LORA)
    assert answers(base, [*adapters, None], max_loras=max_loras) == expected


def test_tritons_kernels_give_them_too(base, adapters, expected, monkeypatch):
    use_kernels(monkeypatch, lora=triton_lora.STACKED_LORA)
    wanted = [answer[:3] for answer in expected]
    assert answers(base, [*adapters, None], max_tokens=3) == wanted


@pytest.mark.parametrize("family", ["llama, biases", "phi3", "qwen3 moe, dense layers"])
def test_slices_follow_what_the_checkpoint_joins_and_mixtures_have_none(tmp_path, monkeypatch, family):
    case = FAMILY_CASES[family]
    random_model(case.config(**{**SMALL, **case.fields})).save_pretrained(tmp_path / "base")
    loras = [str(write_adapter(tmp_path / "adapter", tmp_path / "base", seed=5)), None]
    wanted = answers(tmp_path / "base", loras)
    use_kernels(monkeypatch, lora=STACKED_LORA)
    assert answers(tmp_path / "base", loras) == wanted


class Late:
    """An engine on a late device, whose steps are launched ahead and replayed from graphs."""

    def __init__(self, base, monkeypatch, *, max_loras, seed=None, **limits):
        table = use_kernels(monkeypatch, lora=STACKED_LORA, **CAPTURED)
        decoder = load(str(base), dtype=torch.float32, device=CPU).decoder
        targets = adapter_targets(decoder.config)
        self.device = LateDevice(seed)
        slots = AdapterSlots(
            adapter_shapes(targets), table.lora, self.device, num_slots=max_loras, max_rank=16, dtype=torch.float32
        )
        loader = PeftLoader(targets, slots.stage, max_rank=16, dtype=torch.float32)
        self.cache = LoraCache(loader.load, slots.put, max_loras=max_loras, max_overtakes=4)
        limits = toy_limits(max_num_seqs=6, max_num_batched_tokens=64, **limits)
        kv = allocate_kv_cache(2, limits.num_kv_blocks, limits.block_size, 2, 16, torch.float32, CPU)
        graphs = DecodeGraphs(decoder, kv, self.device, slots, sizes=[8, 4, 2, 1], max_model_len=limits.max_model_len)
        runner = row_runner(decoder, kv, self.device, limits, graphs=graphs, adapters=slots)
        self.core = toy_core(limits, runner=runner, adapters=self.cache)
        self.core._loop = OverlappedLoop(self.core.scheduler, runner, limits.max_num_batched_tokens)

    def answers(self, asks):
        """Each of them a prompt, an adapter or None, and a number of tokens."""
        self.core.add_requests(
            NewRequest(index, prompt, params(max_tokens), lora=lora)
            for index, (prompt, lora, max_tokens) in enumerate(asks)
        )
        outputs = {}
        while self.core.has_unfinished:
            outputs |= {output.index: output for output in self.core.step()}
            self.core.scheduler.check_integrity()
        assert not any(output.error for output in outputs.values())
        return [outputs[index].outputs[0].token_ids for index in range(len(asks))]


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_adapters_that_make_room_for_each_other_change_nothing_of_steps_on_the_device(
    base, adapters, expected, monkeypatch, max_loras, seed
):
    late = Late(base, monkeypatch, max_loras=max_loras, seed=seed, scheduling_policy="fcfs")
    asks, wanted = [], []
    lengths = cycle([12, 3, 7])
    for _ in range(2):
        for place, (prompt, lora) in enumerate((prompt, lora) for prompt in PROMPTS for lora in [*adapters, None]):
            asks.append((prompt, lora, next(lengths)))
            wanted.append(expected[place][: asks[-1][2]])
    assert late.answers(asks) == wanted
    assert late.cache.num_evictions > 2
    assert late.device.num_replays > 5


@pytest.mark.parametrize("with_adapter", [True, False])
def test_only_a_step_with_an_adapter_is_replayed_from_the_graphs_that_add_them(
    base, adapters, expected, monkeypatch, with_adapter
):
    added = []

    def add(x, y, rows, stacked):
        added.append(len(x))
        STACKED_LORA.add(x, y, rows, stacked)

    late = Late(base, monkeypatch, max_loras=1)
    late.core._loop._runner._adapters._kernels = STACKED_LORA._replace(add=add)
    added.clear()
    lora = adapters[0] if with_adapter else None
    (answer,) = late.answers([(PROMPTS[0], lora, 12)])
    assert answer == expected[0 if with_adapter else 3]
    assert late.device.num_replays >= 11
    assert bool(added) == with_adapter


def rank_one(value):
    return {(0, "down"): [LowRank(torch.full((1, 2), float(value)), torch.ones(3, 1), 0, 3)]}


@pytest.mark.parametrize("kernels", [STACKED_LORA, packed_lora(plain_linear)], ids=["stacked", "packed"])
def test_a_slot_is_written_after_the_steps_before_and_before_the_steps_after(kernels):
    device = LateDevice()
    shapes = {(0, "down"): LoraShape(2, (3,)), (0, "qkv"): LoraShape(2, (1, 1, 1))}
    slots = AdapterSlots(shapes, kernels, device, num_slots=2, max_rank=4, dtype=torch.float32)

    def put(factors):
        slots.put(1, {place: slots.stage(pairs) for place, pairs in factors.items()})

    def launch():
        def work():
            y = torch.zeros(3, 3)
            adapters = slots.of_step(torch.tensor([1, -1, 1]))
            for projection in ("down", "qkv"):
                adapters.add(0, projection, torch.ones(3, 2), y)
            return [y]

        return device.download(work)

    steps = [launch()]
    for factors in (rank_one(1), rank_one(5), {}):
        put(factors)
        steps.append(launch())
    assert [step.wait()[0][:, 0].tolist() for step in steps] == [[0, 0, 0], [2, 0, 2], [10, 0, 10], [0, 0, 0]]


def test_stacks_have_their_memory_at_once_and_packed_adapters_take_it_as_they_come(base):
    shapes = adapter_shapes(adapter_targets(load(str(base), dtype=torch.float32, device=CPU).decoder.config))
    options = {"num_slots": 3, "max_rank": 20, "dtype": torch.float32}
    stacked = AdapterSlots(shapes, STACKED_LORA, CpuDevice(), **options)
    packed = AdapterSlots(shapes, packed_lora(plain_linear), CpuDevice(), **options)
    allocated = sum(slots.a.nbytes + slots.b.nbytes for slots in stacked._slots.values())
    # A layer's linears have 64+64 inputs and outputs (query, out), 64+32 (key, value), 64+96 (gate, up, down).
    inputs_and_outputs = 2 * (2 * 128 + 2 * 96 + 3 * 160)
    assert packed.bytes_to_come == 3 * 20 * inputs_and_outputs * 4
    assert (allocated, stacked.bytes_to_come) == (3 * 32 * inputs_and_outputs * 4, 0)


@pytest.mark.parametrize(("gpu_memory", "rank"), [(2**30, 32), (None, 20)])
def test_the_capacity_that_is_told_leaves_room_for_the_adapters(base, monkeypatch, gpu_memory, rank):
    monkeypatch.setattr("engine.memory.available_memory", lambda: 4 * 2**20)
    device = "auto" if gpu_memory else "cpu"
    without, with_adapters = (
        kv_capacity(EngineConfig(str(base), device=device, max_loras=count, max_lora_rank=20), gpu_memory)
        for count in (0, 2)
    )
    adapter = 2 * (2 * 128 + 2 * 96 + 3 * 160) * rank * 4
    share = 1 if gpu_memory else 0.5
    difference = (without.kv_tokens - with_adapters.kv_tokens) * without.kv_bytes_per_token
    assert difference == pytest.approx(2 * adapter * share, abs=without.kv_bytes_per_token * without.block_size)
