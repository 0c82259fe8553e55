"""What is counted of whom: rows change hands, sequences fork, are preempted and come back, and steps fail."""

from collections import Counter
from functools import partial
from random import Random

import pytest
import torch

from engine.device import CpuDevice
from engine.row_slots import RowSlots
from engine.sampling.penalties import PenaltyRows
from engine.sequence import SequenceStatus
from kernels import ops
from kernels.ops import kernels_for
from kernels.reference_sampling import IN_PROMPT
from tests.engine.late_device import LateDevice
from tests.engine.toy import VOCAB_SIZE, request

CPU = CpuDevice()
TABLES = {"cpu": kernels_for(CPU.place), "definitions": ops._TORCH}
REPETITION, PRESENCE, FREQUENCY = 1.5, 0.75, 0.25


@pytest.fixture(params=TABLES, autouse=True)
def table(request, monkeypatch):
    monkeypatch.setattr("engine.sampling.penalties.kernels_for", lambda device: TABLES[request.param])


def sequence_of(prompt, output=(), *, penalised=True):
    penalties = {"repetition_penalty": REPETITION, "presence_penalty": PRESENCE, "frequency_penalty": FREQUENCY}
    (sequence,) = request(0, prompt, max_tokens=None, **(penalties if penalised else {})).sequences
    sequence.token_ids.extend(output)
    sequence.status = SequenceStatus.RUNNING
    return sequence


def penalised(sequence):
    """What is left of logits that are all 4, by the plain definition."""
    num_prompt = sequence.request.num_prompt_tokens
    logits = torch.full((VOCAB_SIZE,), 4.0)
    output = Counter(sequence.token_ids[num_prompt:])
    for token in set(sequence.token_ids):
        logits[token] = 4 / torch.tensor(REPETITION) - FREQUENCY * output[token] - PRESENCE * (output[token] > 0)
    return logits


def apply(edit, num_rows):
    logits = torch.full((num_rows, VOCAB_SIZE), 4.0)
    edit.apply(logits)
    return logits


def tensors(edit, num_rows):
    return [apply(edit, num_rows)]


def check(rows, *sequences):
    edit = rows.edit(sequences, CPU)
    assert torch.allclose(apply(edit, len(sequences)), torch.stack([penalised(one) for one in sequences]), atol=1e-6)
    return edit


def test_a_step_sends_only_the_tokens_that_are_new():
    rows, one, other = PenaltyRows(RowSlots(2)), sequence_of([1, 2, 2]), sequence_of([3], [4])
    edit = check(rows, one, other)
    assert len(edit.new.fresh) == 2
    assert sorted(edit.new.token_ids.tolist()) == [1, 2, 3, 4], "a prompt's tokens once each"
    assert edit.new.increments.tolist().count(IN_PROMPT) == 3
    one.token_ids.append(2)
    other.token_ids.extend([4, 5])
    edit = check(rows, one, other)
    assert len(edit.new.fresh) == 0
    assert edit.new.token_ids.tolist() == [2, 4, 5]


def test_rows_without_penalties_take_no_part():
    rows, plain, one = PenaltyRows(RowSlots(1)), sequence_of([7], penalised=False), sequence_of([1])
    assert rows.edit([plain], CPU) is None
    edit = rows.edit([plain, one, plain], CPU)
    assert edit.penalties.rows.tolist() == [1]
    assert torch.equal(apply(edit, 3)[::2], torch.full((2, VOCAB_SIZE), 4.0))


def test_all_draws_of_a_prompt_that_forks_are_penalised_and_its_tokens_counted_once():
    rows, one = PenaltyRows(RowSlots(1)), sequence_of([1, 2])
    edit = check(rows, one, one, one)
    assert sorted(edit.new.token_ids.tolist()) == [1, 2]


def test_a_fork_counts_for_itself():
    rows, parent = PenaltyRows(RowSlots(2)), sequence_of([1], [2, 2])
    check(rows, parent)
    child = parent.fork(1, 0)
    child.status = SequenceStatus.RUNNING
    child.token_ids.append(3)
    parent.token_ids.append(2)
    check(rows, parent, child)


def test_a_sequence_that_comes_back_to_a_row_that_another_had_is_counted_anew():
    rows, one, other = PenaltyRows(RowSlots(1)), sequence_of([1], [5, 5]), sequence_of([2], [6])
    for sequence, rest in ((one, other), (other, one), (one, other)):
        sequence.status, rest.status = SequenceStatus.RUNNING, SequenceStatus.WAITING
        sequence.token_ids.append(9)
        assert len(check(rows, sequence).new.fresh) == 1


def test_after_a_step_that_failed_all_is_counted_anew():
    rows, one = PenaltyRows(RowSlots(2)), sequence_of([1], [5])
    check(rows, one)
    one.token_ids.append(5)
    rows.edit([one], CPU)  # and never applied
    rows.forget()
    one.token_ids.append(6)
    assert len(check(rows, one).new.fresh) == 1


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_between_steps_on_a_device_that_runs_late(seed):
    random, device = Random(seed), LateDevice(seed)
    rows, known, checks = PenaltyRows(RowSlots(3)), [], []
    for _ in range(200):
        running = [one for one in known if one.status is SequenceStatus.RUNNING]
        waiting = [one for one in known if one.status is SequenceStatus.WAITING]
        event = random.choice(["new", "fork", "preempt", "resume", "resume", "finish", "fail", *["step"] * 5])
        if event == "new" and len(running) < 3:
            known.append(sequence_of(random.choices(range(9), k=random.randint(1, 6))))
        elif event == "fork" and running and len(running) < 3:
            known.append(random.choice(running).fork(1, 0))
        elif event == "preempt" and running:
            random.choice(running).status = SequenceStatus.WAITING
        elif event == "resume" and waiting and len(running) < 3:
            random.choice(waiting).status = SequenceStatus.RUNNING
        elif event == "finish" and running:
            random.choice(running).finish("stop")
        elif event == "fail" and running:
            rows.edit(running, device)
            rows.forget()
        elif event == "step" and running:
            step = random.sample(running, random.randint(1, len(running)))
            edit, expected = rows.edit(step, device), torch.stack([penalised(one) for one in step])
            checks.append((device.download(partial(tensors, edit, len(step))), expected))
            for one in step:
                one.token_ids.append(random.randrange(12))
    assert len(checks) > 20
    for found, expected in checks:
        assert torch.allclose(torch.from_numpy(*found.wait()), expected, atol=1e-6)
