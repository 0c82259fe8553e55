"""Requests start in the order of a prefix tree: what that saves, who comes first, and that nobody waits for ever."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import Sampled, StepOutput
from engine.sampling.seeds import choice_seed
from engine.scheduler import Scheduler
from engine.waiting import PrefixOrder
from tests.engine.toy import answer, next_token, request, run_step, toy_limits, toy_runner

NEW_TOKENS = 24


def few_shot_prompts(num_prefixes=10, num_variants=5, rows_per_variant=4, own_tokens=40):
    """Rows over a tree: prefixes of 600 tokens, each with variants of 100, each with questions; shuffled."""
    rng = random.Random(5)

    def text(length):
        return [rng.randrange(50_000) for _ in range(length)]

    prompts = []
    for prefix in [text(600) for _ in range(num_prefixes)]:
        for variant in [text(100) for _ in range(num_variants)]:
            prompts += [[*prefix, *variant, *text(own_tokens)] for _ in range(rows_per_variant)]
    rng.shuffle(prompts)
    return prompts


def run_without_model(prompts, *, max_tokens=NEW_TOKENS, **limits):
    """All requests to their end, with a runner that says 1 for ever; the scheduler's numbers after it."""
    scheduler = Scheduler(
        toy_limits(
            **{
                "max_num_seqs": 96,
                "max_num_batched_tokens": 2048,
                "max_model_len": 1024,
                "block_size": 32,
                "num_kv_blocks": 100_000,
                **limits,
            }
        )
    )
    for index, prompt in enumerate(prompts):
        scheduler.add(request(index, prompt, max_tokens=max_tokens, ignore_eos=True))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan.rows
        scheduler.commit(plan, StepOutput(tuple(Sampled(1) for row in plan.rows for _ in range(row.num_samples))))
    return scheduler.stats()


UNLIMITED = 100_000
A_QUARTER_OF_THE_TREE = 87  # of its 11,000 tokens, in blocks of 32


def test_a_pool_for_a_quarter_of_the_prefixes_saves_what_an_unlimited_one_would():
    prompts = few_shot_prompts()
    possible = run_without_model(prompts, num_kv_blocks=UNLIMITED).cached_tokens
    assert possible == 200 * 21 * 32 - (10 * 18 + 50 * 3) * 32, "each block of prefix and variant is computed once"
    saved = run_without_model(prompts, num_kv_blocks=A_QUARTER_OF_THE_TREE).cached_tokens
    assert saved == possible
    by_arrival = run_without_model(prompts, num_kv_blocks=A_QUARTER_OF_THE_TREE, scheduling_policy="fcfs")
    assert by_arrival.cached_tokens < possible / 2


def test_rows_that_share_blocks_run_beside_each_other_where_otherwise_there_is_no_room():
    prompts = few_shot_prompts()
    in_order = run_without_model(prompts, num_kv_blocks=A_QUARTER_OF_THE_TREE)
    by_arrival = run_without_model(prompts, num_kv_blocks=A_QUARTER_OF_THE_TREE, scheduling_policy="fcfs")
    assert in_order.step_rows / in_order.steps > 3 * by_arrival.step_rows / by_arrival.steps


def test_the_room_of_rows_that_wait_for_a_shared_prefix_is_not_given_to_others():
    # A pool for one prefix of four blocks with its three rows, or for one row of each of the two prefixes.
    scheduler = Scheduler(toy_limits(max_num_batched_tokens=64, num_kv_blocks=12, max_model_len=24))
    one, other = [1] * 16, [2] * 16
    for index, prompt in enumerate([[*one, 3], [*one, 4], [*other, 5], [*other, 6], [*one, 7]]):
        scheduler.add(request(index, prompt, max_tokens=3, ignore_eos=True))
    runner = toy_runner(scheduler.config)
    started = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        started.append(plan.started)
        scheduler.commit(plan, runner.execute(plan))
        scheduler.check_integrity()
    assert [group for group in started if group][:2] == [(0,), (1, 4)]
    assert scheduler.stats().cached_tokens == 3 * 16


def starts(scheduler):
    """The requests in the order in which they start, one step of one seat after the other."""
    runner = toy_runner(scheduler.config)
    order = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        order += plan.started
        scheduler.commit(plan, runner.execute(plan))
    return order


def one_seat(**limits):
    return Scheduler(toy_limits(max_num_seqs=1, **limits))


def test_the_order_is_depth_first():
    scheduler = one_seat()
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    prompts = [[*a, *b, 0], [*b, 0], [*a, *c, 0], [*b, *a, 0], [*a, *b, *c, 0], [*a, 0]]
    for index, prompt in enumerate(prompts):
        scheduler.add(request(index, prompt))
    assert starts(scheduler) == [0, 4, 2, 5, 1, 3]


def test_of_prompts_that_share_nothing_or_the_same_the_likely_longest_come_first():
    scheduler = one_seat()
    prefix = [9] * 4
    for index, max_tokens in enumerate([2, 10, 2, 10]):
        scheduler.add(request(index, [*([index] * 4), 0], max_tokens=max_tokens))
    for index, max_tokens in enumerate([1, 20, 40], 4):
        scheduler.add(request(index, [*prefix, index], max_tokens=max_tokens))
    assert starts(scheduler) == [6, 5, 4, 1, 3, 0, 2]


def test_a_group_whose_answers_have_been_short_comes_after_one_whose_were_long():
    scheduler = one_seat()
    for index in range(32):
        group = "short" if index % 2 else "long"
        # The toy's answers are as long as they may be, or one token.
        stop = {"stop_token_ids": [next_token([index])]} if index % 2 else {"ignore_eos": True}
        scheduler.add(request(index, [index], max_tokens=40, group=group, **stop))
    starts(scheduler)
    for index, group in enumerate(["short", "long", "short", "long"]):
        scheduler.add(request(index, [100 + index], max_tokens=40, group=group, ignore_eos=True))
    assert starts(scheduler) == [1, 3, 0, 2]


def test_a_higher_priority_comes_before_prefixes_and_lengths():
    scheduler = one_seat()
    for index, priority in enumerate([0, 5, 0, 5]):
        scheduler.add(request(index, [7] * 9, max_tokens=40 - index, priority=priority))
    assert starts(scheduler) == [1, 3, 0, 2]


def test_one_whose_turn_never_comes_is_passed_so_often_and_no_more_often():
    order = PrefixOrder(1, 4, lambda request: request.max_tokens, max_overtakes=10)
    lonely = request(0, [5] * 8, max_tokens=1)
    order.add(lonely)
    for index in range(1, 100):
        order.add(request(index, [1] * 8, max_tokens=40))
        if order.take() is lonely:
            break
    assert index == 11


def test_a_request_that_was_aborted_while_it_waited_does_not_start():
    scheduler = one_seat()
    for index in range(4):
        scheduler.add(request(index, [*([1] * 8), index]))
    assert scheduler.abort(1).finished
    assert scheduler.abort(1) is None
    scheduler.check_integrity()
    assert starts(scheduler) == [0, 2, 3]


def test_adapters_are_neighbours_too_though_their_blocks_are_not_named_yet():
    order = PrefixOrder(1, 4, lambda request: 1)
    for index, lora in enumerate(["a", "b", None, "a", "b", None]):
        order.add(request(index, [1] * 8, lora=lora))
    assert [order.take().index for _ in range(6)] == [0, 3, 1, 4, 2, 5]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.sampled_from([1, 2]), max_size=3),  # a prompt of whole blocks
            st.lists(st.integers(0, 9), min_size=1, max_size=3),
            st.integers(1, 27),
            st.integers(1, 3),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=25,
    ),
    arrivals=st.lists(st.integers(0, 4), min_size=25, max_size=25),
    policy=st.sampled_from(["prefix", "fcfs"]),
)
def test_whatever_comes_in_whatever_order_into_a_tight_pool_is_answered_once(rows, arrivals, policy):
    limits = toy_limits(
        num_kv_blocks=12, max_model_len=40, max_num_batched_tokens=10, max_num_seqs=5, scheduling_policy=policy
    )
    scheduler, runner = Scheduler(limits), toy_runner(limits)
    asked = [
        request(
            index,
            [unit for unit in units for _ in range(4)] + tail,
            max_tokens=most,
            n=n,
            temperature=4,
            priority=level,
        )
        for index, (units, tail, most, n, level) in enumerate(rows)
    ]
    waiting, finished = list(asked), []
    for count in arrivals:
        for _ in range(min(count, len(waiting))):
            scheduler.add(waiting.pop(0))
        finished += run_step(scheduler, runner) if scheduler.has_unfinished else []
        scheduler.check_integrity()
    for late in waiting:
        scheduler.add(late)
    while scheduler.has_unfinished:
        finished += run_step(scheduler, runner)
        scheduler.check_integrity()
    assert sorted(done.index for done in finished) == list(range(len(rows)))
    for done in asked:
        for sequence in done.sequences:
            room = min(done.params.max_tokens, 40 - done.num_prompt_tokens)
            seed = choice_seed(done.seed, sequence.choice)
            assert sequence.output_token_ids == answer(done.prompt_token_ids, room, temperature=4, seed=seed)
