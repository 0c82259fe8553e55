"""Mixtures whose experts are stacked, as a GPU's kernels have them: the same tokens, and graphs can hold them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.graphs import DecodeGraphs
from engine.loader import LoadedModel, load
from engine.messages import NewRequest
from engine.models.moe import MixtureOfExperts
from engine.sampling.params import SamplingParams
from kernels import reference, torch_attention
from kernels.experts import ExpertWeights, StackedExperts, stack_experts
from kernels.ops import GraphPlans, allocate_kv_cache
from tests.engine.families import CASES, SMALL, random_model, tokens
from tests.engine.kernel_tables import use_kernels
from tests.engine.late_device import LateDevice, row_runner
from tests.engine.test_graphs import LengthsOnTheDevice
from tests.engine.toy import toy_core, toy_limits

CPU = torch.device("cpu")
STACKED = {"stack_experts": stack_experts, "mixture_of_experts": reference.mixture_of_experts}
CAPTURED = {
    "write_qkv": reference.write_qkv,
    "plan_attention": torch_attention.plan_attention,
    "paged_attention": LengthsOnTheDevice.attend,
    "graph_plans": GraphPlans(lambda kv: True, LengthsOnTheDevice.reserve, LengthsOnTheDevice.refill),
}
# Whose weights are stored expert by expert; gates of GELU; a dense layer between; all in one tensor, with biases and a
# swiglu that is clamped.
FAMILIES = ("mixtral", "mixtral, window", "qwen3 moe, dense layers", "gpt-oss")


def saved(path: Path, name: str) -> Path:
    case = CASES[name]
    random_model(case.config(**{**SMALL, **case.fields})).save_pretrained(path)
    return path


def read(folder: Path, quantize: str | None = None) -> LoadedModel:
    return load(str(folder), dtype=torch.float32, device=CPU, quantize=quantize, model_impl="native")


def mixtures(loaded: LoadedModel) -> list[MixtureOfExperts]:
    parts = [layer.feed_forward for layer in loaded.decoder._weights.layers]
    return [part for part in parts if isinstance(part, MixtureOfExperts)]


def answers(loaded: LoadedModel, *, device: LateDevice | None = None) -> dict[int, Sequence[int]]:
    """Greedy answers of an engine; with a device, its decode steps are replayed from graphs."""
    model, limits = loaded.config, toy_limits(max_num_batched_tokens=64, block_size=16, num_kv_blocks=33)
    kv = allocate_kv_cache(model.num_layers, 33, 16, model.num_kv_heads, model.head_dim, torch.float32, CPU)
    graphs = None
    if device:
        graphs = DecodeGraphs(loaded.decoder, kv, device, sizes=[4, 2, 1], max_model_len=limits.max_model_len)
    runner = row_runner(loaded.decoder, kv, device or LateDevice(), limits, graphs=graphs)
    core = toy_core(limits, runner=runner)
    core.add_requests(
        NewRequest(
            n,
            [token % 256 for token in tokens(5 + 9 * n, n)],
            SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
        )
        for n in range(3)
    )
    found = {}
    while core.has_unfinished:
        found |= {output.index: output.outputs[0].token_ids for output in core.step()}
    assert all(len(answer) == 9 for answer in found.values())
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_stacked_experts_give_the_tokens_of_those_that_are_packed_one_by_one(tmp_path, monkeypatch, name):
    folder = saved(tmp_path, name)
    one_by_one = read(folder)
    assert not any(mixture.capturable for mixture in mixtures(one_by_one))
    wanted = answers(one_by_one)
    use_kernels(monkeypatch, **STACKED)
    loaded = read(folder)
    assert len(mixtures(loaded)) == len(mixtures(one_by_one)) > 0
    assert all(isinstance(mixture._experts, StackedExperts) for mixture in mixtures(loaded))
    assert answers(loaded) == wanted


def test_a_mixture_is_replayed_from_graphs(tmp_path, monkeypatch):
    folder = saved(tmp_path, "gpt-oss, no biases of attention")
    wanted = answers(read(folder))
    use_kernels(monkeypatch, **STACKED, **CAPTURED)
    loaded = read(folder)
    kv = allocate_kv_cache(1, 2, 16, 1, 16, torch.float32, CPU)
    assert loaded.decoder.capturable(kv)
    device = LateDevice()
    assert answers(loaded, device=device) == wanted
    assert device.num_replays > 5


def test_quantised_experts_are_packed_one_by_one_and_no_graph_holds_them(tmp_path, monkeypatch):
    folder = saved(tmp_path, "mixtral, window")
    wanted = answers(read(folder, "int8"))
    use_kernels(monkeypatch, **STACKED, **CAPTURED)
    loaded = read(folder, "int8")
    assert not any(isinstance(mixture._experts, StackedExperts) for mixture in mixtures(loaded))
    assert not loaded.decoder.capturable(allocate_kv_cache(1, 2, 16, 1, 16, torch.float32, CPU))
    assert answers(loaded) == wanted


def test_each_expert_is_in_its_place():
    experts = (
        ExpertWeights(torch.full((6, 2), float(n)), torch.full((6,), 10.0 + n), torch.full((2, 3), -float(n)), None)
        for n in range(4)
    )
    stacked = stack_experts(experts, 4, reference.silu_and_mul)
    assert [(part.shape, part.unique().tolist()) for part in stacked.gate_up] == [((6, 2), [n]) for n in range(4)]
    assert [(part.shape, part.unique().tolist()) for part in stacked.down] == [((2, 3), [-n]) for n in range(4)]
    assert [part.unique().tolist() for part in stacked.gate_up_bias] == [[10 + n] for n in range(4)]
    assert stacked.down_bias is None


@pytest.mark.parametrize("given", [3, 5])
def test_fewer_experts_than_were_said_or_more_are_an_error(given):
    weights = ExpertWeights(torch.ones(6, 2), torch.ones(6), torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="zip"):
        stack_experts([weights] * given, 4, reference.silu_and_mul)
