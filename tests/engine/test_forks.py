"""Several continuations of one prompt: what they share, what is copied and when, and that each is its own answer."""

import math

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.detokenizer import StopStringWatcher
from engine.loader import load
from engine.messages import NewRequest
from engine.plan import MoveKind
from engine.sampling.seeds import choice_seed
from engine.scheduler import Scheduler
from tests.engine.models_fixture import byte_tokenizer, tiny_llama
from tests.engine.toy import ToyModel, answer, request, run_step, toy_core, toy_limits, toy_runner

CPU = torch.device("cpu")
HOT = 4.0  # a temperature at which the toy's continuations differ


def sampled(index, prompt, n, **params):
    return request(index, prompt, **{"n": n, "temperature": HOT, "ignore_eos": True, **params})


def answers(asked, max_tokens, n):
    """The toy's answers to the same prompt asked `n` times, each time with the seed of another choice."""
    prompt = asked.prompt_token_ids
    seeds = [choice_seed(asked.seed, choice) for choice in range(n)]
    return [answer(prompt, max_tokens, ignore_eos=True, temperature=HOT, seed=seed) for seed in seeds]


def run(scheduler, runner):
    while scheduler.has_unfinished:
        run_step(scheduler, runner)
        scheduler.check_integrity()
    assert scheduler.tables.pool.references() == {}
    assert scheduler.tables.swap.pool.references() == {}


def generated(asked):
    return [sequence.output_token_ids for sequence in asked.sequences]


@pytest.mark.parametrize(("prompt_length", "num_copies"), [(10, 7), (8, 0), (9, 7), (11, 7), (3, 7)])
def test_forked_continuations_share_the_prompts_blocks_and_copy_only_its_tail(prompt_length, num_copies):
    scheduler = Scheduler(toy_limits(max_num_seqs=8))
    runner = toy_runner(scheduler.config)
    asked = sampled(0, range(prompt_length), n=8)
    scheduler.add(asked)
    run_step(scheduler, runner)
    num_blocks = math.ceil(prompt_length / 4)
    assert list(scheduler.tables.pool.references().values()) == [8] * num_blocks
    assert len({tuple(sequence.block_ids) for sequence in asked.sequences}) == 1

    plan = scheduler.schedule()
    assert [move.kind for move in plan.moves] == [MoveKind.COPY] * num_copies
    references = sorted(scheduler.tables.pool.references().values())
    assert references == [1] * 8 + [8] * (prompt_length // 4), "a block of its own for each, beside those that are full"
    runner.move_blocks(plan.moves)
    scheduler.commit(plan, runner.execute(plan))
    assert scheduler.schedule().moves == ()
    run(scheduler, runner)
    assert generated(asked) == answers(asked, 8, 8)
    assert len(set(map(tuple, generated(asked)))) == 8


def test_the_last_holder_of_a_tail_writes_in_place():
    scheduler = Scheduler(toy_limits())
    runner = toy_runner(scheduler.config)
    asked = sampled(0, range(10), n=2)
    (first, *_), (second, *_) = answers(asked, 1, 2)
    assert first != second
    stopped = sampled(0, range(10), n=2, stop_token_ids=[second])
    scheduler.add(stopped)
    run_step(scheduler, runner)
    assert [sequence.finish_reason for sequence in stopped.sequences] == [None, "stop"]
    assert list(scheduler.tables.pool.references().values()) == [1, 1, 1]
    assert scheduler.schedule().moves == ()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("prompt_length", [8, 10])
def test_a_request_may_have_more_continuations_than_there_are_seats(prompt_length, options):
    scheduler = Scheduler(toy_limits(max_num_seqs=4, **options))
    runner = toy_runner(scheduler.config)
    asked = sampled(0, range(prompt_length), n=11)
    scheduler.add(asked)
    run(scheduler, runner)
    assert generated(asked) == answers(asked, 8, 11)
    assert [sequence.choice for sequence in asked.sequences] == list(range(11))


def test_continuations_without_a_seat_find_the_prompt_in_the_cache_and_go_before_other_requests():
    scheduler = Scheduler(toy_limits(max_num_seqs=2, scheduling_policy="fcfs"))
    runner = toy_runner(scheduler.config)
    asked, other = sampled(0, range(10), n=4, max_tokens=2), sampled(1, range(50, 60), n=1)
    scheduler.add(asked)
    scheduler.add(other)
    run_step(scheduler, runner)
    run_step(scheduler, runner)
    assert [sequence.finish_reason for sequence in asked.sequences] == ["length", "length", None, None]
    plan = scheduler.schedule()
    assert [(row.sequence, row.start, row.num_tokens) for row in plan.rows] == [
        (asked.sequences[2], 8, 3),
        (asked.sequences[3], 8, 3),
    ]


def test_admission_counts_the_seats_of_continuations_that_are_still_to_come():
    scheduler = Scheduler(toy_limits(max_num_seqs=5, max_num_batched_tokens=8))
    for index in range(3):
        scheduler.add(sampled(index, range(20 * index, 20 * index + 6), n=4))
    # The first takes four of five seats while it is but one row, the second the fifth; the third finds none.
    plan = scheduler.schedule()
    assert [row.sequence.request.index for row in plan.rows] == [0, 1]
    assert scheduler.num_waiting == 1


def test_seats_are_kept_for_continuations_while_their_prompt_is_computed():
    scheduler = Scheduler(toy_limits(max_num_seqs=4, max_num_batched_tokens=8))
    runner = toy_runner(scheduler.config)
    asked, other = sampled(0, range(20), n=4), sampled(1, range(50, 55), n=1)
    scheduler.add(asked)
    run_step(scheduler, runner)
    scheduler.add(other)
    while len(asked.sequences) == 1:
        run_step(scheduler, runner)
    assert [row.sequence for row in scheduler.schedule().rows] == asked.sequences
    assert other.num_cached_tokens is None, "it has not begun"


def test_admission_counts_the_blocks_of_continuations_that_are_still_to_come():
    def started(n):
        scheduler = Scheduler(toy_limits(max_num_seqs=16, num_kv_blocks=21, max_num_batched_tokens=64))
        for index in range(3):
            scheduler.add(sampled(index, range(20 * index, 20 * index + 8), n=n, max_tokens=10))
        return len(scheduler.schedule().rows)

    # Of 20 blocks, a prompt of two and an answer of seven tokens expected take four, or eight with two more answers.
    assert started(1) == 3
    assert started(3) == 2


def test_all_continuations_may_end_with_their_first_token():
    scheduler = Scheduler(toy_limits(max_num_seqs=2))
    asked = sampled(0, range(5), n=4, max_tokens=1)
    scheduler.add(asked)
    assert run_step(scheduler, toy_runner(scheduler.config)) == [asked]
    scheduler.check_integrity()
    assert generated(asked) == answers(asked, 1, 4)
    assert scheduler.tables.pool.references() == {}


@pytest.mark.parametrize("swap_blocks", [0, 30])
def test_continuations_that_are_preempted_go_on_as_they_began(swap_blocks):
    scheduler = Scheduler(toy_limits(num_kv_blocks=12, max_model_len=44, num_host_blocks=swap_blocks))
    runner = toy_runner(scheduler.config)
    asked = [sampled(index, range(index, index + 10), n=3, max_tokens=30) for index in range(2)]
    for one in asked:
        scheduler.add(one)
    run(scheduler, runner)
    stats = scheduler.stats()
    assert stats.preemptions > 0
    assert bool(stats.swaps) == bool(swap_blocks)
    for one in asked:
        assert generated(one) == answers(one, 30, 3)


def test_a_continuation_whose_logits_are_not_numbers_ends_its_request_and_no_other():
    class Broken(ToyModel):
        def logits(self, hidden):
            logits = super().logits(hidden)
            logits[hidden[:, 0] == broken_after] = math.nan
            return logits

    scheduler = Scheduler(toy_limits(max_num_seqs=8))
    bad, good = sampled(0, range(10), n=3), sampled(1, range(30, 35), n=3)
    # What the toy wants to say after two tokens of the second continuation, and nowhere else in the first two steps.
    tokens = answers(bad, 2, 3)[1]
    broken_after = answer([*range(10), *tokens], 1, ignore_eos=True)[0]
    runner = toy_runner(scheduler.config, Broken())
    scheduler.add(bad)
    scheduler.add(good)
    run(scheduler, runner)
    assert bad.error.code == "nan_logits"
    assert {sequence.finish_reason for sequence in bad.sequences} == {"error"}
    assert generated(good) == answers(good, 8, 3)


def waiting(scheduler, runner, asked):
    assert scheduler.num_waiting


def in_mid_prompt(scheduler, runner, asked):
    run_step(scheduler, runner, 5)
    assert not asked.sequences[0].output_token_ids


def just_forked(scheduler, runner, asked):
    run_step(scheduler, runner)
    assert max(scheduler.tables.pool.references().values()) == 3


def without_a_seat(scheduler, runner, asked):
    just_forked(scheduler, runner, asked)
    assert scheduler.num_waiting


def in_mid_answer(scheduler, runner, asked):
    for _ in range(4):
        run_step(scheduler, runner)


def in_a_plan_that_failed(scheduler, runner, asked):
    just_forked(scheduler, runner, asked)
    runner.move_blocks(scheduler.schedule().moves)


def preempted(scheduler, runner, asked):
    while not scheduler.stats().preemptions:
        run_step(scheduler, runner)
    assert bool(scheduler.stats().swap_blocks_used) == bool(scheduler.config.num_host_blocks)


@pytest.mark.parametrize("num_host_blocks", [0, 30])
@pytest.mark.parametrize(
    "state", [waiting, in_mid_prompt, just_forked, without_a_seat, in_mid_answer, in_a_plan_that_failed, preempted]
)
def test_an_abort_gives_all_blocks_back_in_every_state(state, num_host_blocks):
    scheduler = Scheduler(
        toy_limits(num_kv_blocks=12, max_model_len=44, max_num_seqs=3, num_host_blocks=num_host_blocks)
    )
    runner = toy_runner(scheduler.config)
    asked = sampled(0, range(10), n=4, max_tokens=30)
    scheduler.add(asked)
    state(scheduler, runner, asked)
    assert scheduler.abort(0) is asked
    assert {sequence.finish_reason for sequence in asked.sequences} == {"abort"}
    scheduler.check_integrity()
    assert scheduler.tables.pool.references() == {}
    assert scheduler.tables.swap.pool.references() == {}
    assert not scheduler.has_unfinished
    for tokens, expected in zip(generated(asked), answers(asked, 30, 4), strict=False):
        assert tokens == expected[: len(tokens)]


def test_a_fork_in_mid_answer_goes_on_from_its_parents_tokens_and_text():
    tokenizer = byte_tokenizer()
    scheduler = Scheduler(toy_limits())
    runner = toy_runner(scheduler.config)
    asked = request(0, range(9), max_tokens=20, stop=["never"], ignore_eos=True, temperature=HOT)
    (parent,) = asked.sequences
    parent.stop_watcher = StopStringWatcher(tokenizer, ("<ab>",), include_stop=False)
    scheduler.add(asked)
    for _ in range(3):
        run_step(scheduler, runner)
    for token_id in tokenizer("x<a")["input_ids"]:
        parent.append_token(token_id)
    child = scheduler._fork(parent)
    assert child.token_ids == parent.token_ids
    for sequence, text in ((child, "b"), (parent, "c>")):
        for token_id in tokenizer(text)["input_ids"]:
            sequence.append_token(token_id)
    child.append_token(*tokenizer(">")["input_ids"])
    assert (child.finish_reason, child.stop_reason) == ("stop", "<ab>")
    assert child.stop_watcher.stopped_text.endswith("x")
    assert parent.finish_reason is None, "it has seen <a, c and >, and nothing of its child's text"


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_beams_that_do_not_fit_the_pool_together_find_the_same(num_host_blocks):
    def search(**options):
        core = toy_core(toy_limits(max_num_seqs=3, num_host_blocks=num_host_blocks, max_model_len=32, **options))
        params = SamplingParams(temperature=0, beam_width=5, n=5, max_tokens=16, ignore_eos=True)
        core.add_requests(NewRequest(index, [index, *range(9)], params) for index in range(2))
        outputs = []
        while core.has_unfinished:
            outputs += core.step()
            core.scheduler.check_integrity()
        assert core.scheduler.tables.pool.references() == {}
        found = {output.index: [one.token_ids for one in output.outputs] for output in outputs}
        return found, core.scheduler.stats()

    found, _ = search(max_num_batched_tokens=64)
    # Eight blocks hold one beam of full length, and not much of a second one.
    in_little_room, stats = search(num_kv_blocks=9)
    assert in_little_room == found
    assert stats.preemptions > 0
    assert bool(stats.swaps) == bool(num_host_blocks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return load(str(tiny_llama(tmp_path_factory.mktemp("llama"))), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("prompt_length", [32, 21])
def test_eight_continuations_are_the_answers_to_eight_requests_with_their_seeds(llama, prompt_length):
    prompt = [(7 * place + 3) % 250 for place in range(prompt_length)]

    def ask(*params):
        config = EngineConfig("llama", num_kv_blocks=64, block_size=16, max_num_seqs=8)
        core = assemble_engine(config, llama, CPU)
        core.add_requests(NewRequest(index, prompt, one) for index, one in enumerate(params))
        outputs = []
        while core.has_unfinished:
            outputs += core.step()
        core.scheduler.check_integrity()
        assert core.scheduler.tables.pool.references() == {}
        return sorted(outputs, key=lambda output: output.index), core.stats()

    rules = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24, "repetition_penalty": 1.1}
    (together,), stats = ask(SamplingParams(n=8, seed=5, **rules))
    assert [one.index for one in together.outputs] == list(range(8))
    assert stats.prompt_tokens == prompt_length, "the prompt is computed once"
    alone, _ = ask(*(SamplingParams(seed=choice_seed(5, choice), **rules) for choice in range(8)))
    assert [one.token_ids for one in together.outputs] == [output.outputs[0].token_ids for output in alone]
    assert len({one.token_ids for one in together.outputs}) == 8


def test_answers_without_a_seed_are_those_of_the_engines_seed():
    def ask(seed):
        core = toy_core(seed=seed)
        core.add_requests([NewRequest(0, [1, 2, 3], SamplingParams(n=3, temperature=HOT, max_tokens=6))])
        outputs = []
        while core.has_unfinished:
            outputs += core.step()
        return [one.token_ids for one in outputs[0].outputs]

    assert ask(1) == ask(1) != ask(2)
    assert len(set(ask(1))) == 3
