"""Whole prompts, first come, first served, under two budgets."""

import numpy as np
import pytest

from engine.core import EngineCore
from engine.encoder.scheduler import EncoderScheduler
from engine.errors import OutOfMemory, RequestError
from engine.info import EngineInfo
from engine.loop import PlainLoop
from engine.messages import NewRequest
from engine.plan import StepOutput
from engine.pooling.intake import PoolingIntake, PoolingModel
from engine.pooling.params import PoolingParams
from engine.pooling.pooler import Pooler
from engine.request import Request


def make_scheduler(lengths=(), **limits):
    scheduler = EncoderScheduler(**{"max_num_seqs": 4, "max_num_batched_tokens": 20, "max_length": 16, **limits})
    for index, length in enumerate(lengths):
        scheduler.add(request(index, length))
    return scheduler


def request(index, length):
    return Request.to_pool(index, [1] * length, Pooler("mean"))


def indices(plan):
    return [row.sequence.request.index for row in plan.rows]


def output(plan):
    return StepOutput((), pooled={n: np.array([row.num_tokens], np.float32) for n, row in enumerate(plan.rows)})


def test_rows_are_the_oldest_that_fit_in_order_of_length():
    scheduler = make_scheduler([9, 3, 7, 2, 1])
    plan = scheduler.schedule()
    assert indices(plan) == [1, 2, 0], "the fourth would go beyond 20 tokens, and the fifth does not overtake it"
    assert [(row.start, row.num_tokens, row.num_samples) for row in plan.rows] == [(0, 3, 0), (0, 7, 0), (0, 9, 0)]
    assert plan.num_tokens == 19


def test_no_more_rows_than_the_row_budget():
    assert indices(make_scheduler([1] * 6, max_num_seqs=3).schedule()) == [0, 1, 2]


def test_a_plan_that_is_not_committed_changes_nothing():
    scheduler = make_scheduler([5, 6])
    assert scheduler.schedule() == scheduler.schedule()
    assert scheduler.num_waiting == 2


def test_the_oldest_prompt_runs_even_beyond_the_budget():
    scheduler = make_scheduler([10, 1])
    assert indices(scheduler.schedule(4)) == [0]


def test_a_commit_finishes_all_rows_and_keeps_the_others():
    scheduler = make_scheduler([9, 3, 7, 2])
    plan = scheduler.schedule()
    finished = scheduler.commit(plan, output(plan))
    assert [r.index for r in finished] == [1, 2, 0]
    assert all(r.finished and r.pooler.vector(r.num_prompt_tokens) == [1] for r in finished)
    assert indices(scheduler.schedule()) == [3]
    stats = scheduler.stats()
    assert (stats.waiting, stats.prompt_tokens, stats.steps, stats.tail_steps) == (1, 19, 1, 0)
    scheduler.check_integrity()


def test_what_is_too_long_is_refused_and_what_is_aborted_never_runs():
    scheduler = make_scheduler([16, 2])
    with pytest.raises(RequestError, match="17 tokens, and the model takes 16") as caught:
        scheduler.add(request(2, 17))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ValueError, match="index 1"):
        scheduler.add(request(1, 3))
    assert scheduler.abort(0).sequences[0].finish_reason == "abort"
    assert scheduler.abort(0) is None
    assert indices(scheduler.schedule()) == [1]
    scheduler.fail(scheduler.schedule().rows[0].sequence.request, RequestError("no"))
    assert not scheduler.has_unfinished
    assert scheduler.schedule().rows == ()


def test_steps_that_do_not_fit_the_memory_shrink_to_what_does_and_fail_only_what_never_can():
    class SmallMemory:
        def __init__(self):
            self.tried = []

        def move_blocks(self, moves):
            pass

        def execute(self, plan):
            self.tried.append(plan.num_tokens)
            if plan.num_tokens > 8:
                raise OutOfMemory("no memory left")
            return output(plan)

    info = EngineInfo(
        model="small",
        dtype="float32",
        device="cpu",
        max_model_len=16,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        vocab_size=10,
        num_kv_blocks=0,
        block_size=0,
        tasks=("embed",),
    )
    runner = SmallMemory()
    scheduler = make_scheduler()
    core = EngineCore(
        scheduler,
        PlainLoop(scheduler, runner, 20),
        info,
        tokenizer=None,
        eos_token_ids=frozenset(),
        seed=0,
        pooling=PoolingIntake(PoolingModel("embed", 1, "mean", False), None, vocab_size=10, max_length=16),
    )
    core.add_requests(NewRequest(n, [1] * length, PoolingParams()) for n, length in enumerate([5, 4, 12, 3, 6, 2]))
    outputs = {}
    while core.has_unfinished:
        outputs |= {out.index: out for out in core.step()}
    assert [outputs[n].error and outputs[n].error.code for n in range(6)] == [None, None, "out_of_memory", *[None] * 3]
    assert len(runner.tried) < 20
