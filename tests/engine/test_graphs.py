"""Graphs of decode steps: which sizes there are, what is padded, and which steps they serve."""

import math
from itertools import pairwise

import pytest
import torch

from engine import SamplingParams
from engine.graphs import DecodeGraphs, graph_sizes
from engine.loader import load
from engine.messages import NewRequest
from engine.scheduler import Scheduler
from kernels import reference, torch_attention
from kernels.cache import NULL_BLOCK, AttentionBatch, allocate_kv_cache
from kernels.ops import GraphPlans
from tests.engine.late_device import LateDevice, row_runner
from tests.engine.models_fixture import tiny_llama
from tests.engine.toy import ToyModel, answer, request, toy_core, toy_limits, toy_runner


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (2, [2, 1]), (5, [8, 4, 2, 1]), (16, [16, 8, 4, 2, 1]), (17, [32, 16, 8, 4, 2, 1])],
)
def test_sizes_fall_and_the_largest_holds_all_rows(max_num_seqs, sizes):
    assert graph_sizes(max_num_seqs) == sizes


def test_beyond_512_rows_there_are_no_sizes_and_below_no_gap_is_wide():
    sizes = graph_sizes(2000)
    assert sizes == graph_sizes(512)
    assert (sizes[0], sizes[-1]) == (512, 1)
    assert all(0 < larger - smaller <= max(32, smaller) for larger, smaller in pairwise(sizes))


class RecordingModel(ToyModel):
    """Remembers which forward passes ran, and on how many tokens; captured ones run for each replay."""

    def __init__(self):
        self.lengths = []
        self.slots = []

    def forward(self, token_ids, positions, batch, kv, adapters=None, plans=None):
        self.lengths.append((len(token_ids), plans is not None))
        self.slots.append(batch.slot_mapping.tolist())
        return super().forward(token_ids, positions, batch, kv, adapters, plans)


def run(limits, prompts, *, max_tokens=6):
    device, model = LateDevice(), RecordingModel()
    runner = toy_runner(limits, model, device, graphs=True)
    model.lengths.clear()
    model.slots.clear()
    core = toy_core(limits, runner=runner)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    core.add_requests(NewRequest(n, prompt, params) for n, prompt in enumerate(prompts))
    outputs = {}
    while core.has_unfinished:
        outputs |= {output.index: output for output in core.step()}
    for n, prompt in enumerate(prompts):
        assert list(outputs[n].outputs[0].token_ids) == answer(prompt, max_tokens, ignore_eos=True)
    return device, model, runner


def test_each_size_is_captured_once_the_largest_first():
    device, _, _ = run(toy_limits(max_num_seqs=5), [[n, 1] for n in range(5)])
    assert device.captured == [8, 4, 2, 1]


def test_a_decode_step_is_replayed_from_the_least_size_that_holds_it():
    device, model, _ = run(toy_limits(max_num_seqs=9, max_num_batched_tokens=64), [[n, 1] for n in range(5)])
    assert model.lengths == [(10, False), *[(8, True)] * 5], "the prompts together, and then five rows in a graph of 8"
    assert device.num_replays == 5


def test_steps_with_more_than_a_token_of_a_row_are_not_replayed():
    _, model, _ = run(toy_limits(max_num_seqs=2, max_num_batched_tokens=8), [[1, 2], list(range(20))])
    assert (8, False) in model.lengths
    assert all(replayed == (length in (1, 2)) for length, replayed in model.lengths)


def test_steps_of_more_rows_than_any_graph_holds_are_not_replayed(monkeypatch):
    monkeypatch.setattr("engine.graphs._SIZES", (1, 2, 4))
    device, model, _ = run(toy_limits(max_num_seqs=6, max_num_batched_tokens=64), [[n] for n in range(6)])
    assert device.captured == [4, 2, 1]
    assert model.lengths == [(6, False)] * 6


def test_padded_rows_write_nothing():
    _, model, runner = run(toy_limits(max_num_seqs=9), [[n, 1] for n in range(5)])
    padded = [slots for slots, (length, _) in zip(model.slots, model.lengths, strict=True) if length == 8]
    assert all(slots[5:] == [-1] * 3 and min(slots[:5]) >= 0 for slots in padded)
    assert len(padded) == 5
    assert runner._kv.data[:, :, NULL_BLOCK].count_nonzero() == 0


def test_capturing_writes_nothing_and_leaves_no_rows():
    limits, model = toy_limits(max_num_seqs=9), ToyModel()
    kv = allocate_kv_cache(1, 65, 4, 1, 2, torch.float32, torch.device("cpu"))
    kv.data.fill_(7)
    DecodeGraphs(model, kv, LateDevice(), sizes=[16, 8, 4, 2, 1], max_model_len=limits.max_model_len)
    assert kv.data.unique().tolist() == [7]


def test_a_smaller_step_does_not_see_the_rows_of_a_larger_one_before_it():
    """Those that end early leave their tables and lengths in the buffers."""
    limits = toy_limits(max_num_seqs=8)
    device, model = LateDevice(), ToyModel()
    core = toy_core(limits, runner=toy_runner(limits, model, device, graphs=True))
    core.add_requests(
        NewRequest(n, [n] * (1 + 3 * n), SamplingParams(temperature=0, max_tokens=2 + n, ignore_eos=True))
        for n in range(8)
    )
    outputs = {}
    while core.has_unfinished:
        outputs |= {output.index: output for output in core.step()}
    for n in range(8):
        assert list(outputs[n].outputs[0].token_ids) == answer([n] * (1 + 3 * n), 2 + n, ignore_eos=True)
    assert device.num_replays > 4


def test_all_sizes_have_their_output_in_one_place():
    kv = allocate_kv_cache(1, 65, 4, 1, 2, torch.float32, torch.device("cpu"))
    graphs = DecodeGraphs(ToyModel(), kv, LateDevice(), sizes=[4, 2, 1], max_model_len=64)
    assert len({graph._graph.output.data_ptr() for graph in graphs._graphs.values()}) == 1


def test_padding_is_the_values_that_say_nothing():
    limits, device = toy_limits(max_num_seqs=4), LateDevice()
    runner, scheduler = toy_runner(limits, ToyModel(), device, graphs=True), Scheduler(limits)
    for n in range(3):
        scheduler.add(request(n, [n]))
    plan = scheduler.schedule()
    placed = runner._inputs.place(plan)
    device.synchronize()
    blocks = [row.sequence.block_ids[0] for row in plan.rows]
    attention = placed.inputs.attention
    assert placed.inputs.token_ids.tolist() == [0, 1, 2, 0]
    assert placed.inputs.positions.tolist() == [0] * 4
    assert attention.slot_mapping.tolist() == [4 * blocks[0], 4 * blocks[1], 4 * blocks[2], -1]
    assert attention.seq_lens.tolist() == [1, 1, 1, 0]
    assert attention.context_lens == (1, 1, 1, 0)
    assert attention.query_start.tolist() == [0, 1, 2, 3, 3]
    assert attention.block_tables.tolist() == [[blocks[0]], [blocks[1]], [blocks[2]], [NULL_BLOCK]]
    assert attention.host_block_tables.tolist() == attention.block_tables.tolist()


class LengthsOnTheDevice:
    """Attention whose plan for a graph is tensors alone: the lengths of the rows and their block tables."""

    @staticmethod
    def reserve(batch, kv, num_heads, window, max_context_len):
        return torch.zeros_like(batch.seq_lens), batch.block_tables

    @staticmethod
    def refill(plan, batch, kv, num_heads):
        plan[0].zero_()[: len(batch.context_lens)] = torch.tensor(batch.context_lens)

    @staticmethod
    def attend(query, layer, plan, scale, softcap=None, sinks=None):
        if not isinstance(plan[0], torch.Tensor):
            return torch_attention.paged_attention(query, layer, plan, scale, softcap, sinks)
        lengths = plan[0][plan[0] > 0].tolist()
        out = torch.full_like(query, math.nan)
        if lengths:
            batch = AttentionBatch(None, plan[0], plan[1], None, (1,) * len(lengths), tuple(lengths))
            rows = query[: len(lengths)]
            out[: len(lengths)] = reference.paged_attention(rows, layer, batch, scale, None, softcap, sinks)
        return out


def test_a_decoder_replayed_from_graphs_gives_the_same_tokens(tmp_path):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    limits = toy_limits(block_size=8, max_num_batched_tokens=64, num_kv_blocks=33)
    asks = [NewRequest(n, [n, 5, 9], SamplingParams(temperature=0, max_tokens=4 + 3 * n)) for n in range(3)]
    answers, device = [], LateDevice()
    for captured in (False, True):
        kv = allocate_kv_cache(2, 33, 8, 2, 16, torch.float32, torch.device("cpu"))
        decoder = loaded.decoder
        graphs = None
        if captured:
            decoder._kernels = decoder._kernels._replace(
                write_qkv=reference.write_qkv,
                plan_attention=torch_attention.plan_attention,
                paged_attention=LengthsOnTheDevice.attend,
                graph_plans=GraphPlans(lambda kv: True, LengthsOnTheDevice.reserve, LengthsOnTheDevice.refill),
            )
            assert decoder.capturable(kv)
            graphs = DecodeGraphs(decoder, kv, device, sizes=[4, 2, 1], max_model_len=limits.max_model_len)
        core = toy_core(limits, runner=row_runner(decoder, kv, device, limits, graphs=graphs))
        core.add_requests(asks)
        outputs = {}
        while core.has_unfinished:
            outputs |= {output.index: output.outputs[0].token_ids for output in core.step()}
        answers.append(outputs)
    assert answers[0] == answers[1]
    assert device.num_replays == max(map(len, answers[0].values())) - 1


def test_what_no_graph_can_hold_is_not_captured(tmp_path):
    loaded = load(str(tiny_llama(tmp_path)), dtype=torch.float32, device=torch.device("cpu"))
    kv = allocate_kv_cache(2, 33, 8, 2, 16, torch.float32, torch.device("cpu"))
    assert not loaded.decoder.capturable(kv), "a CPU's kernels"
