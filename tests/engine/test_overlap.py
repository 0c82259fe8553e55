"""Steps that are launched ahead, and graphs, on a device that runs late: the same tokens as one step at a time."""

import math
from collections import Counter
from itertools import count
from random import Random

import pytest

from engine import PoolingParams, SamplingParams, StructuredOutput
from engine.loop import OverlappedLoop
from engine.messages import NewRequest
from engine.pooling.intake import PoolingIntake, PoolingModel
from tests.engine.late_device import LateDevice
from tests.engine.mixes import MAX_MODEL_LEN, check_answer, draw_ask
from tests.engine.models_fixture import byte_tokenizer
from tests.engine.toy import VOCAB_SIZE, FaultyRunner, ToyModel, answer, toy_core, toy_limits, toy_runner

POISON = 259
NUM_ENGINES = 12


class FragileToy(ToyModel):
    """Gives what is no number after some contexts, and after all that hold the poison."""

    def state(self, context):
        broken = POISON in context or (31 * sum(context) + len(context)) % 211 == 0
        return math.nan if broken else super().state(context)


class WatchedRunner(FaultyRunner):
    """Remembers what it was asked for, and which blocks the steps on the device use."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []
        self.steps = []
        self.num_dropped = 0

    def launch(self, plan):
        step = super().launch(plan)
        self.calls.append(("launch", plan))
        self.steps.append((step, {block for row in plan.rows for block in row.sequence.block_ids}))
        return step

    def sample(self, step):
        try:
            super().sample(step)
        except Exception:
            self.steps.pop()
            raise
        self.calls.append(("sample", step.plan))

    def collect(self, step):
        ((launched, _),) = self.steps[:1]
        assert launched is step
        del self.steps[0]
        self.calls.append(("collect", step.plan))
        self.num_dropped += sum(row.sequence.finished for row in step.plan.rows)
        return super().collect(step)

    @property
    def blocks_in_use(self):
        return set().union(*(blocks for _, blocks in self.steps))


def late_core(limits, device, *, overlapped=True, rows=True, graphs=False, model=None, **faults):
    """A toy engine on a late device. A block that a step on the device uses is given to nobody else."""
    pooling = PoolingIntake(
        PoolingModel(task="embed", size=1, pooling="last", normalize=False),
        None,
        vocab_size=VOCAB_SIZE,
        max_length=limits.max_model_len,
    )
    faults = {"fits": lambda plan: True, **faults}
    runner = WatchedRunner(toy_runner(limits, model, device, rows=rows, graphs=graphs), **faults)
    core = toy_core(limits, runner=runner, tokenizer=byte_tokenizer(), pooling=pooling)
    if overlapped:
        core._loop = OverlappedLoop(core.scheduler, runner, limits.max_num_batched_tokens)
    pool = core.scheduler.tables.pool
    allocate = pool.allocate

    def watched_allocate(number):
        blocks = allocate(number)
        assert not runner.blocks_in_use & set(blocks), "a step on the device uses what is handed out"
        return blocks

    pool.allocate = watched_allocate
    return core, runner


def finish(core, asks=(), max_steps=5000):
    """Step until nothing is left; those of `asks` who give up do so in between."""
    outputs = []
    for step in range(max_steps):
        for index, ask in enumerate(asks):
            if ask and ask.give_up_after == step:
                core.abort(index)
        if not core.has_unfinished:
            break
        outputs += core.step()
        core.scheduler.check_integrity()
    assert not core.has_unfinished, "the engine does not come to an end"
    assert core.scheduler.tables.pool.references() == {}
    assert core.scheduler.tables.swap.pool.references() == {}
    assert len({output.index for output in outputs}) == len(outputs), "a request was answered twice"
    return {output.index: output for output in outputs}


def ask_all(core, asks):
    core.add_requests(NewRequest(index, ask.prompt, ask.params, ask.salt) for index, ask in enumerate(asks) if ask)
    return finish(core, asks)


def draw_limits(random):
    block_size = random.choice([1, 2, 4, 16])
    fewest = -(-MAX_MODEL_LEN // block_size) + 1
    return toy_limits(
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=fewest + random.choice([0, 1, fewest // 2, 2 * fewest]),
        num_host_blocks=random.choice([0, 3, 3 * fewest]),
        max_num_seqs=random.choice([1, 3, 6, 9]),
        max_num_batched_tokens=random.choice([1, 7, 16, 64]),
        enable_prefix_caching=random.random() < 0.7,
    )


def one_in(number):
    """Memory that some steps of more than one token do not fit, the `number`th each time."""
    steps = count(1)
    return lambda plan: plan.num_tokens < 2 or bool(next(steps) % number)


@pytest.fixture(scope="module")
def answers_alone():
    """What each request is answered by an engine with room that has nothing else to do, one step at a time."""
    known = {}

    def alone(index, ask):
        ask = ask._replace(give_up_after=None, salt=b"")
        if (key := (index, repr(ask))) not in known:
            core = toy_core(
                toy_limits(max_model_len=MAX_MODEL_LEN, num_kv_blocks=400, max_num_batched_tokens=64, max_num_seqs=9),
                runner=toy_runner(toy_limits(num_kv_blocks=400, max_num_seqs=9), FragileToy()),
                tokenizer=byte_tokenizer(),
                pooling=PoolingIntake(
                    PoolingModel("embed", 1, "last", False), None, vocab_size=VOCAB_SIZE, max_length=MAX_MODEL_LEN
                ),
            )
            (known[key],) = ask_all(core, [None] * index + [ask]).values()
        return known[key]

    return alone


@pytest.mark.parametrize(
    ("overlapped", "rows", "graphs"),
    [
        pytest.param(False, False, False, id="plain, inputs from the host"),
        pytest.param(False, True, False, id="plain"),
        pytest.param(False, True, True, id="plain, graphs"),
        pytest.param(True, True, False, id="overlapped"),
        pytest.param(True, True, True, id="overlapped, graphs"),
    ],
)
def test_every_request_is_answered_as_it_is_alone_one_step_at_a_time(answers_alone, overlapped, rows, graphs):
    seen = Counter()
    for seed in range(NUM_ENGINES):
        random = Random(seed)
        limits = draw_limits(random)
        asks = [
            draw_ask(random, VOCAB_SIZE, POISON, temperatures=[4.0, 5.0])._replace(lora=None)
            for _ in range(random.randint(4, 14))
        ]
        device = LateDevice(seed if seed % 3 else None)
        unlucky = random.choice([3, 7, 10**9])
        core, runner = late_core(
            limits,
            device,
            overlapped=overlapped,
            rows=rows,
            graphs=graphs,
            model=FragileToy(),
            fits=one_in(unlucky),
            fits_sampling=one_in(unlucky + 1),
        )
        outputs = ask_all(core, asks)
        assert sorted(outputs) == list(range(len(asks))), seed
        for index, ask in enumerate(asks):
            expected = answers_alone(index, ask)
            try:
                check_answer(outputs[index], expected, ask)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {limits} answers the {index}th of {asks} in another way") from error
            seen[outputs[index].error.code if outputs[index].error else "an answer"] += 1
        stats = core.stats()
        seen.update({name: getattr(stats, name) for name in ("preemptions", "swaps", "cached_tokens")})
        seen.update(dropped=runner.num_dropped, replays=device.num_replays, late=device.longest_queue > 3)
    expected = {"preemptions", "swaps", "cached_tokens", "nan_logits", "aborted", "invalid_grammar", "late"}
    expected |= {"replays"} if graphs else set()
    expected |= {"dropped"} if overlapped else set()
    assert expected <= {name for name, number in seen.items() if number}, seen


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_it_are_on_the_host():
    core, runner = late_core(toy_limits(), LateDevice())
    core.add_requests([NewRequest(0, [5, 6], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))])
    outputs = finish(core)
    assert list(outputs[0].outputs[0].token_ids) == answer([5, 6], 3, ignore_eos=True)
    assert [call for call, _ in runner.calls] == [
        *("launch", "sample"),
        *("launch", "collect", "sample"),
        *("launch", "collect", "sample"),
        "collect",
    ], "and nothing is launched after what is known to be the last token"


def test_a_row_whose_answer_has_ended_is_dropped_and_keeps_its_blocks_until_then():
    prompt = next([n, n] for n in range(256) if len(answer([n, n], 8)) == 4)
    core, runner = late_core(toy_limits(), LateDevice())
    core.add_requests([NewRequest(0, prompt, SamplingParams(temperature=0, max_tokens=20))])
    while not (outputs := core.step()):
        pass
    assert list(outputs[0].outputs[0].token_ids) == answer(prompt, 8)
    assert runner.steps, "a step with a row of it is on the device"
    assert core.scheduler.tables.pool.references() == dict.fromkeys(runner.blocks_in_use, 1)
    assert not core.scheduler.has_unfinished
    assert not runner.steps[0][0].rows, "for which nothing is drawn"
    finish(core)
    assert runner.num_dropped == 1


def test_an_aborted_row_keeps_its_blocks_until_its_step_has_run():
    core, runner = late_core(toy_limits(), LateDevice())
    core.add_requests([NewRequest(0, [5, 6], ENDLESS)])
    for _ in range(3):
        core.step()
    core.abort(0)
    assert core.scheduler.tables.pool.references() == dict.fromkeys(runner.blocks_in_use, 1)
    (output,) = core.step()
    assert list(output.outputs[0].token_ids) == answer([5, 6], 2, ignore_eos=True)
    finish(core)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=8, structured_output=StructuredOutput(regex="[a-z]{20}")),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=1.0),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, bad_words=["a", "bc"], min_tokens=8),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=["never said"], logprobs=2),
    ],
    ids=["grammar", "penalties", "bad words", "stop strings"],
)
def test_rows_that_need_the_tokens_before_them_run_in_every_step_all_the_same(params):
    core, runner = late_core(toy_limits(), LateDevice())
    core.add_requests([NewRequest(index, [index, 7], params) for index in range(3)])
    while core._grammars or core._unencoded:  # until the grammar is compiled
        core.step()
    finish(core)
    assert core.stats().steps <= 8 + 3
    assert any(len(plan.rows) == 3 for _, plan in runner.calls)


def test_rows_behind_a_prompt_that_forks_go_on_with_their_own_tokens():
    core, runner = late_core(toy_limits(max_num_seqs=12, max_num_batched_tokens=64), LateDevice())
    core.add_requests([NewRequest(0, [1, 2], SamplingParams(n=3, temperature=4, max_tokens=6, ignore_eos=True))])
    core.add_requests(NewRequest(n, [n, 7], GREEDY) for n in range(1, 7))
    outputs = finish(core)
    assert [len(plan.rows) for call, plan in runner.calls if call == "launch"][:2] == [7, 6], (
        "all but the one that forks"
    )
    for n in range(1, 7):
        assert list(outputs[n].outputs[0].token_ids) == answer([n, 7], 6, ignore_eos=True)


def test_a_block_that_is_filled_by_a_token_on_its_way_is_found_by_that_token():
    core, _ = late_core(toy_limits(max_num_seqs=8, num_kv_blocks=33), LateDevice())
    core.add_requests(NewRequest(n, [n, 7], ENDLESS) for n in range(3))
    for _ in range(50):
        core.step()
    # While others wait for room, it is asked in every step which blocks are being filled.
    assert (core.stats().running, core.stats().waiting) == (2, 1)
    core.abort(2)
    outputs = finish(core)
    prompt = [0, 7, *outputs[0].outputs[0].token_ids[:40]]
    core.add_requests([NewRequest(9, prompt, GREEDY)])
    finish(core)
    assert core.stats().cached_tokens == 40


def test_nobody_finds_the_blocks_of_a_row_that_is_no_number():
    core, _ = late_core(toy_limits(max_num_batched_tokens=32), LateDevice(), model=FragileToy())
    prompt = [1, POISON, *range(20)]
    core.add_requests([NewRequest(0, prompt, GREEDY)])
    core.step()
    core.add_requests([NewRequest(1, prompt, GREEDY)])
    assert [output.error.code for output in finish(core).values()] == ["nan_logits"] * 2
    assert core.stats().cached_tokens == 0


def test_beams_alone_are_not_split_over_two_kinds_of_steps():
    limits = toy_limits(max_num_seqs=8)
    asks = [NewRequest(n, [n, 1, 2], SamplingParams(temperature=0, max_tokens=6, beam_width=2)) for n in range(6)]
    steps = []
    for overlapped in (False, True):
        core, _ = late_core(limits, LateDevice(), overlapped=overlapped)
        core.add_requests(asks)
        finish(core)
        steps.append(core.stats().steps)
    assert steps[0] == steps[1]


def test_beams_beside_others_wait_and_the_others_do_not():
    core, _ = late_core(toy_limits(max_num_seqs=8), LateDevice())
    core.add_requests([NewRequest(0, [1, 2], SamplingParams(temperature=0, max_tokens=6, beam_width=1))])
    core.add_requests(NewRequest(n, [n, 7], GREEDY) for n in range(1, 8))
    finished = {}
    for step in range(40):
        finished |= {output.index: step for output in core.step()}
        if len(finished) == 8:
            break
    assert max(finished[n] for n in range(1, 8)) == 6, "six tokens, each collected by the call after its launch"
    assert finished[0] > 6


def test_a_prompt_waits_for_the_blocks_that_a_step_on_the_device_computes():
    core, _ = late_core(toy_limits(max_num_batched_tokens=32), LateDevice())
    core.add_requests([NewRequest(0, [*range(20), 1], GREEDY)])
    core.step()
    core.add_requests([NewRequest(1, [*range(20), 2], GREEDY)])
    finish(core)
    assert core.stats().cached_tokens == 20


def test_nobody_is_preempted_while_a_step_is_on_the_device():
    limits = toy_limits(num_kv_blocks=17, max_model_len=60)
    core, runner = late_core(limits, LateDevice())
    # Short answers first, so that admission expects such, and then too many that are longer.
    short = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=list(range(256)))
    core.add_requests(NewRequest(n, [n], short) for n in range(60))
    finish(core)
    core.add_requests(NewRequest(100 + n, [n, 3], ENDLESS) for n in range(4))
    preempt = core.scheduler._preempt

    def watched_preempt(victim, draft):
        assert not runner.steps
        preempt(victim, draft)

    core.scheduler._preempt = watched_preempt
    outputs = finish(core)
    assert core.stats().preemptions > 0
    for n in range(4):
        assert list(outputs[100 + n].outputs[0].token_ids) == answer([n, 3], 58, ignore_eos=True)


@pytest.mark.parametrize("half", ["fits", "fits_sampling"])
def test_a_step_that_does_not_fit_leaves_the_one_on_the_device_as_it_is(half):
    core, _ = late_core(toy_limits(), LateDevice(), **{half: lambda plan: len(plan.rows) < 2})
    core.add_requests([NewRequest(0, [5, 6], GREEDY)])
    core.step()
    core.step()
    core.add_requests([NewRequest(1, [7, 8, 9], GREEDY)])
    outputs = finish(core)
    for index, prompt in ((0, [5, 6]), (1, [7, 8, 9])):
        if outputs[index].error is None:
            assert list(outputs[index].outputs[0].token_ids) == answer(prompt, 6, ignore_eos=True)
    assert outputs[0].error is None or outputs[1].error is None


def test_a_device_without_any_memory_fails_every_request_and_hangs_none():
    for half in ("fits", "fits_sampling"):
        core, _ = late_core(toy_limits(), LateDevice(), **{half: lambda plan: False})
        core.add_requests(NewRequest(n, [n], GREEDY) for n in range(3))
        assert {output.error.code for output in finish(core).values()} == {"out_of_memory"}


@pytest.mark.parametrize("half", ["fits", "fits_sampling"])
def test_the_largest_request_is_not_failed_if_it_has_just_ended(half):
    """It ends in the step before the one that does not fit."""
    prompt = next([n, n] for n in range(256) if len(answer([n, n], 8)) == 2)
    core, _ = late_core(toy_limits(), LateDevice(), **{half: lambda plan: plan.rows[0].start < 3})
    core.add_requests([NewRequest(0, prompt, SamplingParams(temperature=0, max_tokens=20))])
    (output,) = finish(core).values()
    assert (output.error, list(output.outputs[0].token_ids)) == (None, answer(prompt, 8))


def test_vectors_are_pooled_chunk_by_chunk_ahead():
    core, _ = late_core(toy_limits(max_num_batched_tokens=4), LateDevice())
    prompt = list(range(11))
    core.add_requests([NewRequest(0, prompt, PoolingParams(pooling="mean"))])
    (output,) = finish(core).values()
    hidden = [ToyModel().state(prompt[: n + 1]) for n in range(11)]
    assert output.data.tolist() == [pytest.approx(sum(hidden) / 11)]
