"""Random requests with up to four continuations, forks, aborts and failed steps, in pools too small for them."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.plan import MoveKind
from engine.sampling.seeds import choice_seed
from engine.scheduler import Scheduler
from engine.sequence import SequenceStatus
from tests.engine.toy import EOS, answer, request, run_step, toy_limits, toy_runner

TEMPERATURE = 4.0
# What has happened in all examples together: a run in which some of it never happens tests less than it says.
seen = set()


class SchedulerMachine(RuleBasedStateMachine):
    """The toy reads every row's context back from the blocks, so that a wrong block, copy or swap changes an answer.

    Against it stands a model of few words: the answer to a request is that of as many requests as it has continuations,
    each alone, with its seed. A continuation that is forked off later begins as its parent did.
    """

    enable_prefix_caching = True
    num_host_blocks = 0

    def __init__(self):
        super().__init__()
        self.limits = toy_limits(
            num_kv_blocks=12,
            max_model_len=40,
            max_num_batched_tokens=10,
            max_num_seqs=5,
            num_host_blocks=self.num_host_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.limits)
        self.runner = toy_runner(self.limits)
        self.requests = {}
        self.aborted = set()
        self.forked_at = {}  # (request, choice) -> (parent's choice, tokens in common)

    # Two letters and a few lengths, so that prompts often share prefixes, and some end where a block ends.
    @rule(
        prompt=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3).map(
            lambda units: [u for u in units for _ in range(4)]
        ),
        tail=st.lists(st.integers(0, 9), max_size=3),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 27) | st.just(27),
    )
    def add(self, prompt, tail, n, max_tokens):
        index = len(self.requests)
        temperature = TEMPERATURE if n > 1 or index % 2 else 0
        self.requests[index] = request(index, prompt + tail, n=n, temperature=temperature, max_tokens=max_tokens)
        self.scheduler.add(self.requests[index])

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data):
        index = data.draw(st.sampled_from(sorted(self.requests)))
        if not self.requests[index].finished:
            self.aborted.add(index)
        self.scheduler.abort(index)

    @rule(data=st.data())
    def fork(self, data):
        """Some sequence goes on twice from here, as a beam does."""
        parents = [
            sequence
            for done in self.requests.values()
            if len(done.sequences) < 6
            for sequence in done.sequences
            if sequence.status is not SequenceStatus.FINISHED and sequence.num_output_tokens and done.params.temperature
        ]
        if parents:
            preempted = [parent for parent in parents if parent.status is SequenceStatus.WAITING]
            parent = data.draw(st.sampled_from(preempted or parents))
            child = self.scheduler._fork(parent)
            self.forked_at[parent.request.index, child.choice] = (parent.choice, parent.num_output_tokens)
            seen.add(f"fork of a {parent.status.name.lower()} sequence")

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            if self.scheduler.has_unfinished:
                self.run_one()

    @rule(budget=st.integers(1, 9))
    @precondition(lambda self: self.scheduler.has_unfinished)
    def step_that_fails_and_a_smaller_one(self, budget):
        self.runner.move_blocks(self.scheduler.schedule().moves)
        self.scheduler.check_integrity()
        self.run_one(budget)

    def run_one(self, budget=None):
        plan = self.scheduler.schedule(budget)
        assert plan.rows, "there are requests, and nothing runs"
        assert plan.num_tokens <= (budget or self.limits.max_num_batched_tokens)
        assert len(plan.rows) <= self.limits.max_num_seqs
        seen.update(move.kind for move in plan.moves)
        self.runner.move_blocks(plan.moves)
        self.scheduler.commit(plan, self.runner.execute(plan))
        self.scheduler.check_integrity()

    @invariant()
    def references_agree(self):
        self.scheduler.check_integrity()

    def teardown(self):
        while self.scheduler.has_unfinished:
            run_step(self.scheduler, self.runner)
            self.scheduler.check_integrity()
        assert self.scheduler.tables.pool.references() == {}
        assert self.scheduler.tables.swap.pool.references() == {}
        stats = self.scheduler.stats()
        seen.update(name for name in ("preemptions", "swaps", "cached_tokens") if getattr(stats, name))
        if stats.preemptions > stats.swaps:
            seen.add("recomputations")
        for index, done in self.requests.items():
            assert index in self.aborted or len(done.sequences) >= done.params.n
            for sequence in done.sequences:
                self.check_answer(sequence, aborted=index in self.aborted)

    def check_answer(self, sequence, *, aborted):
        done = sequence.request
        tokens = sequence.output_token_ids
        common = self.common_with_parent(sequence)
        begun = [*done.prompt_token_ids, *common]
        room = min(done.params.max_tokens, self.limits.max_model_len - done.num_prompt_tokens) - len(common)
        seed = choice_seed(done.seed, sequence.choice)
        expected = [*common, *answer(begun, room, temperature=done.params.temperature, seed=seed)]
        if aborted and sequence.finish_reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert sequence.finish_reason == ("stop" if expected[-1] == EOS else "length")

    def common_with_parent(self, sequence):
        if (sequence.request.index, sequence.choice) not in self.forked_at:
            return []
        parent, length = self.forked_at[sequence.request.index, sequence.choice]
        return sequence.request.sequences[parent].output_token_ids[:length]


class SwappingMachine(SchedulerMachine):
    num_host_blocks = 9


class MachineWithoutPrefixCache(SwappingMachine):
    enable_prefix_caching = False


def check(machine, expected):
    """Run rounds of a machine's random examples, until what it is for has happened in them."""
    seen.clear()
    rounds = 0
    while not expected <= seen:
        rounds += 1
        assert rounds <= MOST_ROUNDS, f"never happened: {expected - seen}"
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
            ),
        )


MOST_ROUNDS = 8
ALWAYS = {MoveKind.COPY, "preemptions", "recomputations", "fork of a running sequence", "fork of a waiting sequence"}


def test_with_recomputation_every_answer_is_right_and_every_block_comes_back():
    check(SchedulerMachine, ALWAYS | {"cached_tokens"})


def test_with_swaps_every_answer_is_right_and_every_block_comes_back():
    check(SwappingMachine, ALWAYS | {"cached_tokens", "swaps", MoveKind.SWAP_OUT, MoveKind.SWAP_IN})


def test_without_a_prefix_cache_every_answer_is_right_and_every_block_comes_back():
    check(MachineWithoutPrefixCache, ALWAYS | {"swaps", MoveKind.SWAP_OUT, MoveKind.SWAP_IN})
