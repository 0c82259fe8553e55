"""Preempted sequences in host memory: what is stored, what is found again, and that nothing is computed twice."""

import numpy as np
import pytest

from engine.blocks import block_hash, root_hash
from engine.errors import RequestError
from engine.plan import BlockMove, MoveKind
from engine.pooling.pooler import Pooler
from engine.request import Request
from engine.scheduler import Scheduler
from engine.swap import SwapSpace
from tests.engine.toy import answer, next_token, request, run_step, toy_limits, toy_runner


def keys(count):
    chain = [root_hash(b"")]
    for index in range(count):
        chain.append(block_hash(chain[-1], [index]))
    return chain[1:]


def test_blocks_that_continuations_share_are_stored_once_and_tails_for_each():
    space = SwapSpace(6)
    moves = []
    first = space.store([11, 12, 13], keys(2), moves)
    second = space.store([11, 12, 14], keys(2), moves)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [(move.kind, move.src) for move in moves] == [(MoveKind.SWAP_OUT, src) for src in (11, 12, 13, 14)]
    assert [move.dst for move in moves] == [*first, second[2]]
    assert sorted(space.pool.references().values()) == [1, 1, 2, 2]
    assert space.num_blocks_out == 4


def test_without_room_for_all_nothing_is_stored():
    space = SwapSpace(3)
    space.store([11, 12], [], [])
    moves = []
    assert space.store([13, 14], [], moves) == []
    assert moves == []
    assert space.pool.num_free == 1


def test_without_a_pool_nothing_is_stored():
    assert SwapSpace(0).store([11], keys(1), []) == []


def test_a_block_that_was_read_back_is_not_copied_again_while_it_is_there():
    space = SwapSpace(4)
    stored = space.store([11, 12], keys(2), [])
    moves = []
    space.load(stored, [21, 22], moves)
    assert moves == [BlockMove(MoveKind.SWAP_IN, *pair) for pair in zip(stored, (21, 22), strict=True)]
    space.pool.release(stored)
    again = []
    assert space.store([21, 22, 23], keys(2), again)[:2] == stored
    assert [move.src for move in again] == [23]


def start(num_requests, prompt_length=9, **options):
    scheduler = Scheduler(
        toy_limits(**{"num_kv_blocks": 10, "max_model_len": 36, "max_num_batched_tokens": 36, **options})
    )
    runner = toy_runner(scheduler.config)
    # Short answers first, so that admission counts on more of them, and takes in too many.
    for index in range(100, 140):
        scheduler.add(request(index, [index], max_tokens=30, stop_token_ids=[next_token([index])]))
    finish(scheduler, runner)
    asked = [
        request(index, range(10 * index, 10 * index + prompt_length), max_tokens=20, ignore_eos=True)
        for index in range(num_requests)
    ]
    for one in asked:
        scheduler.add(one)
    return scheduler, runner, asked


def finish(scheduler, runner):
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        scheduler.check_integrity()


def run_until_preempted(scheduler, runner):
    while not scheduler.stats().preemptions:
        run_step(scheduler, runner)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_sequence_that_was_swapped_out_goes_on_where_it_was(enable_prefix_caching):
    scheduler, runner, asked = start(3, num_host_blocks=20, enable_prefix_caching=enable_prefix_caching)
    run_until_preempted(scheduler, runner)
    (victim,) = asked[2].sequences
    computed = victim.num_computed_tokens
    assert computed == victim.num_tokens - 1
    assert len(victim.host_block_ids) == -(-computed // 4)
    assert victim.block_ids == []
    while victim.host_block_ids:
        plan = scheduler.schedule()
        runner.move_blocks(plan.moves)
        scheduler.commit(plan, runner.execute(plan))
        scheduler.check_integrity()
    (resumed,) = [row for row in plan.rows if row.sequence is victim]
    assert (resumed.start, resumed.num_tokens, resumed.num_samples) == (computed, 1, 1)
    finish(scheduler, runner)
    for one in asked:
        assert one.sequences[0].output_token_ids == answer(one.prompt_token_ids, 20, ignore_eos=True)
    stats = scheduler.stats()
    assert stats.swaps == stats.preemptions > 0
    assert stats.swapped_blocks_out > 0
    assert stats.swapped_blocks_in > 0
    assert (stats.swap_blocks_used, stats.swap_blocks_total) == (0, 20)


def test_blocks_that_are_still_in_the_devices_cache_are_not_copied_back():
    scheduler, runner, asked = start(2, num_kv_blocks=21, num_host_blocks=20)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    # As if an older sequence had wanted a single block: of the victim's three, the two full ones stay in the cache.
    victim = scheduler._running[-1]
    on_device = victim.block_ids
    draft_moves = []
    scheduler.tables.swap_out(victim, draft_moves)
    runner.move_blocks(draft_moves)
    scheduler.tables.release(victim)
    moves = []
    hits, _ = scheduler.tables.find_prefix(victim)
    scheduler.tables.start(victim, hits, moves)
    runner.move_blocks(moves)
    assert len(draft_moves) == len(on_device) == 3
    assert [move.kind for move in moves] == [MoveKind.SWAP_IN]
    assert victim.block_ids[:2] == on_device[:2]
    assert victim.num_computed_tokens == 10
    scheduler.check_integrity()
    finish(scheduler, runner)
    assert asked[1].sequences[0].output_token_ids == answer(asked[1].prompt_token_ids, 20, ignore_eos=True)


def test_continuations_find_the_blocks_that_one_of_them_brought_back():
    scheduler = Scheduler(toy_limits(num_kv_blocks=21, num_host_blocks=20))
    runner = toy_runner(scheduler.config)
    asked = request(0, range(8), n=2, temperature=4, max_tokens=20, ignore_eos=True)
    scheduler.add(asked)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    moves = []
    for sequence in asked.sequences:
        scheduler.tables.swap_out(sequence, moves)
        scheduler.tables.release(sequence)
    assert [move.kind for move in moves] == [MoveKind.SWAP_OUT] * 4, "the prompt's two blocks once, and two tails"
    # Everything else is thrown out of the device's cache.
    scheduler.tables.pool.release(scheduler.tables.pool.allocate(20))
    for sequence in asked.sequences:
        hits, _ = scheduler.tables.find_prefix(sequence)
        scheduler.tables.start(sequence, hits, moves)
    assert [move.kind for move in moves[4:]] == [MoveKind.SWAP_IN] * 4
    first, second = (sequence.block_ids for sequence in asked.sequences)
    assert first[:2] == second[:2]
    runner.move_blocks(moves)
    finish(scheduler, runner)


def test_where_the_host_has_no_room_for_all_blocks_they_are_computed_again():
    scheduler, runner, asked = start(3, num_host_blocks=2)
    run_until_preempted(scheduler, runner)
    assert scheduler.stats().swaps == 0
    assert asked[2].sequences[0].num_computed_tokens == 0
    finish(scheduler, runner)
    for one in asked:
        assert one.sequences[0].output_token_ids == answer(one.prompt_token_ids, 20, ignore_eos=True)


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_prompt_that_is_pooled_is_summed_once_whatever_happens_to_its_blocks(num_host_blocks):
    scheduler, runner, asked = start(1, prompt_length=3, num_host_blocks=num_host_blocks)
    prompt = [*range(50, 82)]
    pooled = Request.to_pool(7, prompt, Pooler("mean"))
    scheduler.add(pooled)
    # In chunks of four beside an answer that grows: the prompt wants eight of nine blocks, the answer six.
    while scheduler.has_unfinished:
        run_step(scheduler, runner, 5)
        scheduler.check_integrity()
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert stats.swaps == (stats.preemptions if num_host_blocks else 0)
    expected = np.mean([next_token(prompt[: length + 1]) for length in range(len(prompt))])
    assert pooled.pooler.vector(len(prompt)) == pytest.approx([expected])
    assert asked[0].sequences[0].output_token_ids == answer(asked[0].prompt_token_ids, 20, ignore_eos=True)


def test_a_request_that_fails_while_it_is_swapped_out_gives_the_hosts_blocks_back():
    scheduler, runner, asked = start(3, num_host_blocks=20)
    run_until_preempted(scheduler, runner)
    assert scheduler.stats().swap_blocks_used > 0
    scheduler.fail(asked[2], RequestError("out of luck"))
    scheduler.check_integrity()
    assert scheduler.stats().swap_blocks_used == 0


def test_the_moves_of_a_step_that_failed_are_not_planned_again():
    scheduler, runner, asked = start(3, num_host_blocks=20)
    run_until_preempted(scheduler, runner)
    (victim,) = asked[2].sequences
    while victim.host_block_ids:
        plan = scheduler.schedule()
        runner.move_blocks(plan.moves)
        if not victim.host_block_ids:
            break
        scheduler.commit(plan, runner.execute(plan))
    assert plan.moves
    assert not any(move.kind is MoveKind.SWAP_IN for move in scheduler.schedule().moves)
    finish(scheduler, runner)
    assert victim.output_token_ids == answer(asked[2].prompt_token_ids, 20, ignore_eos=True)
