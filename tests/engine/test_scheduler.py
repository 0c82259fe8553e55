"""The scheduler alone and with a toy model: budgets, preemption, prefix hits, aborts. Random runs: see the machine."""

import pytest

from engine.errors import ConfigError, RequestError
from engine.plan import Sampled, StepOutput
from engine.scheduler import Scheduler
from tests.engine.toy import answer, next_token, request, run_step, toy_limits, toy_runner


def commit_all(scheduler, plan):
    """Commit a plan with the toy's tokens, without a model."""
    tokens = (next_token(row.sequence.token_ids) for row in plan.rows if row.num_samples)
    return scheduler.commit(plan, StepOutput(tuple(map(Sampled, tokens))))


def only(done):
    """The one sequence of a request."""
    (sequence,) = done.sequences
    return sequence


def drain(scheduler, runner, steps=2000):
    finished = []
    while scheduler.has_unfinished:
        finished += run_step(scheduler, runner)
        steps -= 1
        assert steps, "the scheduler does not come to an end"
    return finished


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    scheduler = Scheduler(toy_limits(max_num_batched_tokens=8))
    scheduler.add(request(0, range(20)))
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule()
        chunks.append((plan.rows[0].start, plan.rows[0].num_tokens, plan.rows[0].num_samples))
        commit_all(scheduler, plan)
    assert chunks == [(0, 8, 0), (8, 8, 0), (16, 4, 1)]


def test_running_requests_come_before_waiting_ones():
    scheduler = Scheduler(toy_limits(max_num_batched_tokens=10))
    scheduler.add(request(0, range(6)))
    commit_all(scheduler, scheduler.schedule())
    scheduler.add(request(1, range(100, 120)))
    plan = scheduler.schedule()
    assert [(row.sequence.request.index, row.num_tokens) for row in plan.rows] == [(0, 1), (1, 9)]


def test_a_prompt_of_whole_blocks_that_is_cached_still_computes_its_last_token():
    scheduler = Scheduler(toy_limits())
    for index in range(2):
        scheduler.add(request(index, range(12), max_tokens=1))
        plan = scheduler.schedule()
        commit_all(scheduler, plan)
    assert (plan.rows[0].start, plan.rows[0].num_tokens, plan.rows[0].num_samples) == (8, 4, True)
    assert plan.rows[0].sequence.request.num_cached_tokens == 8


def test_requests_with_different_salts_share_nothing():
    scheduler = Scheduler(toy_limits())
    for index, salt in enumerate([b"a", b"b", b"a"]):
        asked = request(index, range(9), max_tokens=1)
        asked.salt = salt
        scheduler.add(asked)
        commit_all(scheduler, scheduler.schedule())
        assert asked.num_cached_tokens == (8 if index == 2 else 0)


def test_a_prompt_waits_a_step_for_the_prefix_that_another_is_computing():
    scheduler = Scheduler(toy_limits(max_num_batched_tokens=64))
    shared = list(range(16))
    for index in range(3):
        scheduler.add(request(index, [*shared, 100 + index]))
    scheduler.add(request(3, range(50, 60)))
    first = scheduler.schedule()
    assert [row.sequence.request.index for row in first.rows] == [0, 3]
    commit_all(scheduler, first)
    second = scheduler.schedule()
    assert [(row.sequence.request.index, row.start) for row in second.rows] == [(0, 17), (3, 10), (1, 16), (2, 16)]


def test_without_prefix_caching_nothing_is_shared_and_nothing_waits():
    scheduler = Scheduler(toy_limits(max_num_batched_tokens=64, enable_prefix_caching=False))
    for index in range(3):
        scheduler.add(request(index, range(16)))
    assert [row.start for row in scheduler.schedule().rows] == [0, 0, 0]


def test_the_youngest_is_preempted_and_stands_first_in_the_queue():
    # Nine blocks of four. Admission counts on short answers, as the estimate has seen many of them.
    scheduler = Scheduler(toy_limits(num_kv_blocks=10, max_model_len=36, max_num_batched_tokens=36))
    for index in range(40):
        scheduler.add(request(index, [index], max_tokens=30, stop_token_ids=[next_token([index])]))
    runner = toy_runner(scheduler.config)
    drain(scheduler, runner)
    assert scheduler.stats().preemptions == 0
    for index in range(3):
        scheduler.add(request(index, range(10 * index, 10 * index + 9), max_tokens=20, ignore_eos=True))
    requests = [sequence.request for sequence in scheduler._waiting]
    plan = scheduler.schedule()
    while not scheduler.stats().preemptions:
        scheduler.commit(plan, runner.execute(plan))
        plan = scheduler.schedule()
    assert scheduler._waiting[0].request.index == 2
    assert scheduler._waiting[0].block_ids == []
    assert scheduler._waiting[0].num_output_tokens > 0, "what it generated is kept"
    assert 2 not in [row.sequence.request.index for row in plan.rows]
    scheduler.commit(plan, runner.execute(plan))
    drain(scheduler, runner)
    for done in requests:
        assert only(done).output_token_ids == answer(done.prompt_token_ids, 20, ignore_eos=True)


def test_admission_leaves_room_for_the_answers_that_are_expected():
    scheduler = Scheduler(toy_limits(num_kv_blocks=11, max_model_len=40, max_num_batched_tokens=64))
    for index in range(4):
        scheduler.add(request(index, range(10 * index, 10 * index + 4), max_tokens=20))
    # Each will grow to about 4 + 14 tokens, five blocks: ten blocks hold two of them, though four prompts would fit.
    assert len(scheduler.schedule().rows) == 2


@pytest.mark.parametrize("length", [36, 37, 100])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_alone(length):
    scheduler = Scheduler(toy_limits(max_model_len=36))
    with pytest.raises(RequestError) as refused:
        scheduler.add(request(0, [1] * length))
    assert refused.value.code == "context_length_exceeded"
    assert not scheduler.has_unfinished


def test_a_prompt_one_short_of_the_context_gets_one_token():
    scheduler = Scheduler(toy_limits(max_model_len=36, num_kv_blocks=10))
    scheduler.add(request(0, [1] * 35, max_tokens=None, ignore_eos=True))
    (done,) = drain(scheduler, toy_runner(scheduler.config))
    assert (only(done).num_tokens, only(done).finish_reason) == (36, "length")


def test_limits_under_which_a_request_could_never_finish_are_refused():
    with pytest.raises(ConfigError, match="does not fit the KV pool"):
        toy_limits(num_kv_blocks=10, max_model_len=37)


def test_an_abort_is_final_in_every_state():
    scheduler = Scheduler(toy_limits(max_num_seqs=1))
    runner = toy_runner(scheduler.config)
    for index in range(2):
        scheduler.add(request(index, range(9), ignore_eos=True))
    run_step(scheduler, runner)
    assert only(scheduler.abort(1)).num_output_tokens == 0
    assert only(scheduler.abort(0)).num_output_tokens == 1
    assert scheduler.abort(0) is None
    assert not scheduler.has_unfinished
    assert scheduler.stats().kv_blocks_used == 0
    scheduler.check_integrity()


def test_a_plan_that_is_never_committed_changes_no_answer():
    scheduler = Scheduler(toy_limits())
    runner = toy_runner(scheduler.config)
    requests = [request(index, range(index, index + 9)) for index in range(6)]
    for asked in requests:
        scheduler.add(asked)
    while scheduler.has_unfinished:
        runner.execute(scheduler.schedule())
        smaller = scheduler.schedule(token_budget=3)
        assert smaller.num_tokens <= 3
        scheduler.commit(smaller, runner.execute(smaller))
        scheduler.check_integrity()
    for done in requests:
        assert only(done).output_token_ids == answer(done.prompt_token_ids, 8)
