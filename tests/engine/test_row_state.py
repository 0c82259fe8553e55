"""A step's inputs from rows on the device: the numbers that the host would have written, whatever happened before."""

from random import Random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.batch import lay_out
from engine.errors import OutOfMemory
from engine.loop import OverlappedLoop
from engine.lora import LoraAdapter
from engine.messages import NewRequest
from engine.row_slots import RowSlots
from engine.row_state import RowInputs, row_state_bytes
from engine.scheduler import Scheduler
from engine.sequence import SequenceStatus
from kernels.cache import NULL_BLOCK
from kernels.ops import BlockMoves, kernels_for
from kernels.triton import blocks
from kernels.triton import inputs as triton_inputs
from tests.engine.late_device import LateDevice
from tests.engine.toy import answer, request, run_step, toy_core, toy_limits, toy_runner

CPU = torch.device("cpu")


class CountingDevice(LateDevice):
    """Remembers what was uploaded; `fails` says whether an upload finds no memory."""

    def __init__(self, fails=lambda: False):
        super().__init__()
        self.uploads = []
        self.fails = fails

    def upload(self, *arrays):
        if self.fails():
            raise OutOfMemory("no memory left")
        self.uploads.append(arrays)
        return super().upload(*arrays)


def row_inputs(limits, device):
    return RowInputs(
        limits.block_size,
        device,
        kernels_for(CPU),
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )


def check_placed(placed, plan, block_size):
    """Against what the host lays out itself, but for blocks that are reserved and not written to yet."""
    arrays = lay_out(plan, block_size)
    inputs, attention = placed.inputs, placed.inputs.attention
    assert inputs.token_ids.tolist() == arrays.token_ids.tolist()
    assert inputs.positions.tolist() == arrays.positions.tolist()
    assert attention.slot_mapping.tolist() == arrays.slot_mapping.tolist()
    assert attention.query_start.tolist() == arrays.query_start.tolist()
    assert attention.seq_lens.tolist() == arrays.seq_lens.tolist()
    assert (attention.query_lens, attention.context_lens) == (arrays.query_lens, arrays.context_lens)
    assert placed.logits_rows.tolist() == arrays.logits_rows.tolist()
    tables = attention.block_tables.numpy()
    used = -(-np.array(arrays.context_lens) // block_size)
    expected = arrays.block_tables[:, : tables.shape[1]].copy()
    expected[np.arange(tables.shape[1]) >= used[:, np.newaxis]] = NULL_BLOCK
    assert tables.tolist() == expected.tolist()
    assert attention.host_block_tables.tolist() == expected.tolist()


def random_request(random, index):
    params = random.choice([{}, {"n": random.randint(2, 3), "temperature": 4}, {"beam_width": random.randint(1, 3)}])
    prompt = [random.randint(1, 2)] * random.choice([1, 8, 9]) + [index]
    return request(index, prompt, max_tokens=random.randint(1, 20), ignore_eos=random.random() < 0.5, **params)


def test_inputs_from_rows_are_those_that_the_host_lays_out():
    seen = {"preemptions": 0, "swaps": 0, "steps": 0, "out of memory": 0}
    for seed in range(20):
        random = Random(seed)
        limits = toy_limits(
            block_size=random.choice([1, 2, 4]),
            max_model_len=32,
            num_kv_blocks=random.choice([34, 40, 70]),
            num_host_blocks=random.choice([0, 60]),
            max_num_seqs=random.choice([2, 4, 6]),
        )
        scheduler, runner = Scheduler(limits), toy_runner(limits)
        device = CountingDevice(lambda random=random: random.random() < 0.1)
        inputs = row_inputs(limits, device)
        for index in range(12):
            scheduler.add(random_request(random, index))
        while scheduler.has_unfinished:
            plan = scheduler.schedule(random.choice([None, 1, 5]))
            runner.move_blocks(plan.moves)
            try:
                placed = inputs.place(plan)
            except OutOfMemory:
                seen["out of memory"] += 1
                continue
            device.synchronize()
            check_placed(placed, plan, limits.block_size)
            if random.random() < 0.2:
                continue  # as if the forward pass had not fitted
            scheduler.commit(plan, runner.execute(plan))
            if random.random() < 0.1:
                scheduler.abort(random.randrange(12))
        stats = scheduler.stats()
        for name in ("preemptions", "swaps", "steps"):
            seen[name] += getattr(stats, name)
    assert min(seen.values()) > 20, seen


def test_a_block_is_sent_once_and_only_when_it_is_new():
    limits = toy_limits(max_num_seqs=2)
    scheduler, runner, device = Scheduler(limits), toy_runner(limits), CountingDevice()
    inputs = row_inputs(limits, device)
    scheduler.add(request(0, range(9), max_tokens=8, ignore_eos=True))
    num_sent = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        inputs.place(plan)
        num_sent.append(len(device.uploads[-1][5]))
        scheduler.commit(plan, runner.execute(plan))
    # Nine tokens, and then one in each step: the fourth block begins at position 12.
    assert num_sent == [3, 0, 0, 0, 1, 0, 0, 0]


def test_a_forked_sequence_that_writes_to_a_copied_block_reads_it_there():
    limits = toy_limits()
    scheduler, runner, device = Scheduler(limits), toy_runner(limits), CountingDevice()
    inputs = row_inputs(limits, device)
    scheduler.add(request(0, range(6), n=2, temperature=4, max_tokens=5, ignore_eos=True))
    run_step(scheduler, runner)
    plan = scheduler.schedule()
    runner.move_blocks(plan.moves)
    placed = inputs.place(plan)
    device.synchronize()
    first, second = placed.inputs.attention.block_tables.tolist()
    assert first[0] == second[0]
    assert first[1] != second[1], "the tail was copied"
    assert len(plan.moves) == 1


def test_tokens_on_their_way_are_those_last_entered_for_the_row():
    limits = toy_limits()
    scheduler, device = Scheduler(limits), LateDevice()
    inputs = row_inputs(limits, device)
    for index in range(3):
        scheduler.add(request(index, [index, 7], ignore_eos=True, **({"n": 2, "temperature": 4} if index == 0 else {})))
    plan = scheduler.schedule()
    inputs.place(plan)
    scheduler.begin(plan)
    # Two are drawn for the first row; the second is left out, as if it had ended.
    enter = inputs.enter([plan.rows[0], plan.rows[2]])
    device.submit(lambda: enter(torch.tensor([50, 51, 52])))
    (_, _, row) = plan.rows
    row.sequence.num_computed_tokens = 2
    row.sequence.append_placeholder()
    next_plan = plan._replace(rows=(row._replace(start=2, num_tokens=1),), num_tokens=1)
    placed = inputs.place(next_plan)
    device.synchronize()
    assert placed.inputs.token_ids.tolist() == [52]
    assert placed.inputs.positions.tolist() == [2]


class NoAdapters:
    """Slots whose adapters change nothing."""

    def of_step(self, slots):
        return None


def test_padding_of_a_graph_has_no_adapter_whoever_had_its_row_before():
    limits, device = toy_limits(), LateDevice()
    inputs = toy_runner(limits, None, device, graphs=True, adapters=NoAdapters())._inputs
    for num_rows in (4, 3):
        scheduler = Scheduler(limits)
        for index in range(num_rows):
            asked = request(index, [index])
            asked.adapter = LoraAdapter(b"", (), slot=index) if index != 1 else None
            scheduler.add(asked)
        inputs.place(scheduler.schedule())
        device.synchronize()
        seen = inputs._graphs._graphs[4, True].adapter_slots.tolist()
        assert seen == [0, -1, 2, 3 if num_rows == 4 else -1]
        for index in range(num_rows):
            scheduler.abort(index)


@pytest.mark.parametrize("graphs", [False, True])
def test_tritons_kernels_build_and_move_the_same(graphs):
    """An engine in which sequences fork, are swapped out and come back, on a device that runs late."""
    limits = toy_limits(num_kv_blocks=10, max_model_len=36, max_num_batched_tokens=36, num_host_blocks=20)
    moves = BlockMoves(blocks.serves, blocks.copy_blocks, blocks.gather_blocks, blocks.scatter_blocks)
    device = LateDevice()
    runner = toy_runner(
        limits,
        None,
        device,
        rows=True,
        graphs=graphs,
        block_moves=moves,
        build_inputs=triton_inputs.build_inputs,
        advance_rows=triton_inputs.advance_rows,
    )
    core = toy_core(limits, runner=runner)
    core._loop = OverlappedLoop(core.scheduler, runner, limits.max_num_batched_tokens)
    # Answers of one token first, so that admission expects such, and takes in too many.
    short = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=list(range(256)), ignore_eos=True)
    core.add_requests(NewRequest(n, [n], short) for n in range(24))
    long = {"max_tokens": 16, "ignore_eos": True}
    core.add_requests(NewRequest(n, [n, 5, 9], SamplingParams(temperature=0, **long)) for n in range(24, 27))
    core.add_requests([NewRequest(27, [7] * 5, SamplingParams(temperature=4, n=2, seed=0, **long))])
    outputs = {}
    while core.has_unfinished:
        outputs |= {output.index: output for output in core.step()}
    for n in range(24, 27):
        assert list(outputs[n].outputs[0].token_ids) == answer([n, 5, 9], 16, ignore_eos=True)
    first, second = (list(one.token_ids) for one in outputs[27].outputs)
    assert first != second
    stats = core.stats()
    assert stats.swaps > 0
    assert stats.swapped_blocks_in > 0


def sequences(number):
    found = [request(index, [index]).sequences[0] for index in range(number)]
    for sequence in found:
        sequence.status = SequenceStatus.RUNNING
    return found


def test_a_row_is_kept_while_its_sequence_runs_and_taken_when_another_needs_it():
    slots, (a, b, c, d) = RowSlots(3), sequences(4)
    rows = slots.take([a, b, c])
    assert sorted(rows) == [0, 1, 2]
    b.finish("stop")
    assert slots.take([c, a]) == [rows[2], rows[0]]
    assert slots.take([a, d, c]) == [rows[0], rows[1], rows[2]]
    assert slots[d] == rows[1]


def test_a_sequence_that_was_preempted_may_find_its_row_again():
    slots, (a, b, _, _) = RowSlots(2), sequences(4)
    rows = slots.take([a, b])
    a.status = SequenceStatus.WAITING
    assert slots.take([b]) == rows[1:]
    a.status = SequenceStatus.RUNNING
    assert slots.take([a, b]) == rows


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "num_bytes"), [(4, 64, 4 * (16 + 1) * 4), (3, 65, 3 * 18 * 4)]
)
def test_the_memory_of_rows_is_that_of_their_tensors(max_num_seqs, max_model_len, num_bytes):
    inputs = row_inputs(
        toy_limits(max_num_seqs=max_num_seqs, max_model_len=max_model_len, num_kv_blocks=66), LateDevice()
    )
    assert sum(tensor.nbytes for tensor in inputs._rows) == num_bytes
    assert row_state_bytes(max_num_seqs, max_model_len, 4) == num_bytes
