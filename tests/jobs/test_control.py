"""Planning and sweeping: what each does, what a crash in its middle leaves, and that lost tokens come back."""

import threading
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from jobs.broker import ASSEMBLE, CONTROL_QUEUE, PLAN, WORK, model_queue
from jobs.control import Control
from jobs.errors import ServiceUnreachable, StorageError
from jobs.shards import load_plan
from jobs.sweeper import Sweeper
from tests.jobs.ledgers import key, let_leases_run_out, worker
from tests.jobs.site import Site, prompts

MODEL_QUEUE = model_queue("tiny")

BAD = b'{"prompt": "a"}\n\n{"prompt": 7}\nnot json\n[1]\n{"prompt": "b"}\n{"text": "c"}\n'
BAD_PLACES = [
    (3, 17, "invalid_type"),
    (4, 31, "invalid_json_line"),
    (5, 40, "not_an_object"),
    (7, 60, "missing_required_parameter"),
]


class Crashed(Exception):
    """The process is gone."""


def crash(*args: Any, **fields: Any) -> None:
    raise Crashed


def shards_of(site: Site, job_id: str) -> tuple[Any, Any]:
    """What the ledger holds of the plan."""
    client = site.ledger.client
    return client.hgetall(key(job_id, "shards")), client.zrange(key(job_id, "ready"), 0, -1, withscores=True)


# --- plan ---------------------------------------------------------------------------------------------------------


def test_a_planned_job_is_open_and_has_a_token_for_each_shard(site: Site) -> None:
    spec = site.submit(prompts(10))
    assert site.queued(CONTROL_QUEUE) == [(PLAN, f"('{spec.id}',)")]
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.rows, view.shards, view.error_count) == ("in_progress", 10, 3, 0)
    assert site.queued(MODEL_QUEUE) == [(WORK, "('tiny',)")] * 3
    plan = load_plan(site.stores.read(spec.layout.plan))
    assert [shard.rows for shard in plan.shards] == [4, 4, 2]


def test_a_large_job_begins_with_few_tokens(site: Site) -> None:
    site.planned(4 * 100)
    assert len(site.queued(MODEL_QUEUE)) == 64


def test_a_strict_job_fails_before_any_work_and_lists_every_bad_row(site: Site) -> None:
    spec = site.submit(BAD, on_bad_row="fail")
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.error_count, view.error_url) == ("failed", 4, spec.error_url)
    assert [(error.line, error.byte, error.code) for error in view.errors] == BAD_PLACES
    listed = site.rows(spec.error_url)
    assert [(error["line"], error["byte"], error["code"]) for error in listed] == BAD_PLACES
    assert site.queued(MODEL_QUEUE) == []
    assert site.ledger.live_jobs() == []


def test_all_of_many_bad_rows_are_in_the_error_file(site: Site) -> None:
    spec = site.submit(b"no\n" * 250, on_bad_row="fail")
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (len(view.errors), view.error_count) == (100, 250)
    assert [error["line"] for error in site.rows(spec.error_url)] == list(range(1, 251))


def test_a_lenient_job_runs_without_its_bad_rows(site: Site) -> None:
    spec = site.submit(BAD, on_bad_row="skip")
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.rows, view.error_count) == ("in_progress", 6, 4)
    assert [(error.line, error.byte, error.code) for error in view.errors] == BAD_PLACES


@pytest.mark.parametrize("data", [b"\n \n", b"\xef\xbb\xbf\n"])
def test_an_input_without_rows_fails_its_job(site: Site, data: bytes) -> None:
    spec = site.submit(data)
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["empty_file"])


def test_an_input_that_changed_after_the_submit_fails_its_job(site: Site) -> None:
    spec = site.submit(prompts(3))
    site.stores.put(spec.input.files[0].url, b'{"prompt": "another"}\n')
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["input_changed"])


def test_an_input_that_was_deleted_fails_its_job(site: Site) -> None:
    spec = site.submit(prompts(3))
    site.stores.delete([spec.input.files[0].url])
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["not_found"])


def test_a_store_that_does_not_answer_is_no_fault_of_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any) -> None:
        raise ServiceUnreachable("down")

    spec = site.submit(prompts(3))
    with monkeypatch.context() as patch:
        patch.setattr(site.stores.__class__, "stream", unreachable)
        with pytest.raises(ServiceUnreachable):
            site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "validating"
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "in_progress"


@pytest.mark.parametrize("step", ["add_shards", "open"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_a_planner_that_crashed_is_repeated_to_the_same_shards(
    site: Site, step: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = site.planned(10)
    spec = site.submit(prompts(10))
    act = getattr(site.ledger, step)

    def crash_around(*args: Any, **fields: Any) -> None:
        if done:
            act(*args, **fields)
        raise Crashed

    with monkeypatch.context() as patch:
        patch.setattr(site.ledger, step, crash_around)
        with pytest.raises(Crashed):
            site.control.plan(spec.id)
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "in_progress"
    assert shards_of(site, spec.id) == shards_of(site, undisturbed.id)
    site.work(spec)
    assert site.ledger.state(spec.id) == "finalizing"


def test_a_plan_is_kept_even_if_the_limits_have_changed_since(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.submit(prompts(10))
    with monkeypatch.context() as patch:
        patch.setattr(site.ledger, "open", crash)
        with pytest.raises(Crashed):
            site.control.plan(spec.id)
    entered = shards_of(site, spec.id)
    elsewhere = site.settings.model_copy(update={"max_shard_rows": 7})
    Site.of(elsewhere, site.ledger).control.plan(spec.id)
    assert shards_of(site, spec.id) == entered
    assert site.ledger.view(spec.id).shards == 3


@pytest.mark.parametrize("state", ["validating", "finalizing"])
def test_a_plan_of_a_newer_version_is_left_to_newer_control_workers(site: Site, state: str) -> None:
    spec = site.submit(prompts(3))
    site.control.plan(spec.id)
    newer = site.stores.read(spec.layout.plan).replace(b'"format":1', b'"format":2')
    site.stores.put(spec.layout.plan, newer)
    site.ledger.client.hset(key(spec.id, "job"), "state", state)
    site.control.plan(spec.id)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == state
    stalled = str(site.ledger.client.hget(key(spec.id, "job"), "stalled"))
    assert stalled.startswith("a control worker has left it to others: The job's plan has format 2")


def test_planning_again_changes_nothing(site: Site) -> None:
    spec = site.planned(10)
    site.work(spec, shards=1)
    before = site.ledger.view(spec.id), shards_of(site, spec.id), site.queued(MODEL_QUEUE)
    site.control.plan(spec.id)
    assert (site.ledger.view(spec.id), shards_of(site, spec.id), site.queued(MODEL_QUEUE)) == before


def test_a_job_that_is_being_planned_elsewhere_is_left_alone(site: Site) -> None:
    spec = site.submit(prompts(10))
    with site.ledger.lock(spec.id, "plan", 60):
        site.control.plan(spec.id)
        assert site.ledger.state(spec.id) == "validating"
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "in_progress"


def test_a_job_that_is_cancelled_while_it_is_planned_does_not_open(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.submit(prompts(10))
    add_shards = site.ledger.add_shards

    def cancelled_meanwhile(*args: Any) -> str:
        site.ledger.cancel(spec.id)
        return add_shards(*args)

    monkeypatch.setattr(site.ledger, "add_shards", cancelled_meanwhile)
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "cancelling"
    assert site.queued(MODEL_QUEUE) == []


# --- sweep --------------------------------------------------------------------------------------------------------


def test_a_lost_plan_token_is_sent_again(site: Site) -> None:
    spec = site.spec(prompts(3))
    site.ledger.create(spec)
    site.control.sweep()
    assert site.queued(CONTROL_QUEUE) == [(PLAN, f"('{spec.id}',)")]


def test_no_plan_token_is_sent_for_a_job_that_is_being_planned(site: Site) -> None:
    spec = site.spec(prompts(3))
    site.ledger.create(spec)
    with site.ledger.lock(spec.id, "plan", 60):
        site.control.sweep()
    assert site.queued(CONTROL_QUEUE) == []


@pytest.mark.parametrize("state", ["finalizing", "cancelling"])
def test_a_lost_assemble_token_is_sent_again(site: Site, state: str) -> None:
    spec = site.planned(3)
    site.work(spec) if state == "finalizing" else site.ledger.cancel(spec.id)
    assert site.ledger.state(spec.id) == state
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    with site.ledger.lock(spec.id, "fin", 60):
        site.control.sweep()
        assert site.queued(CONTROL_QUEUE) == []
    site.control.sweep()
    assert site.queued(CONTROL_QUEUE) == [(ASSEMBLE, f"('{spec.id}',)")]


def test_a_result_that_cannot_be_written_yet_fails_no_job_and_says_why(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise StorageError("Access to bucket 'x' is refused.", hint="Ask for it.")

    spec = site.planned(4)
    site.work(spec)
    with monkeypatch.context() as patch:
        patch.setattr(site.stores, "concat", refused)
        site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "finalizing"
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    site.control.sweep()
    reason = site.ledger.view(spec.id).reason
    assert reason is not None
    assert "Access to bucket 'x' is refused." in reason
    assert site.queued(CONTROL_QUEUE)[-1] == (ASSEMBLE, f"('{spec.id}',)")
    site.control.assemble(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.done, view.reason) == ("completed", 4, None)


def test_tokens_that_wait_for_a_control_worker_are_not_sent_again(site: Site) -> None:
    spec = site.submit(prompts(4))
    for _ in range(3):
        site.control.sweep()
    assert site.queued(CONTROL_QUEUE) == [(PLAN, f"('{spec.id}',)")]


def test_of_several_control_workers_one_sweeps(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[Control] = []
    monkeypatch.setattr(Control, "sweep", lambda control: sweeps.append(control))
    for control in (first := site.control, second := site.control, first):
        control.sweep_in_turn()
    assert sweeps == [first]
    site.ledger.client.delete("pm:sweeping")  # as when its time is over
    second.sweep_in_turn()
    assert sweeps == [first, second]


def test_the_sweeper_sweeps_on_after_a_sweep_that_failed() -> None:
    swept = threading.Semaphore(0)
    errors = iter([ServiceUnreachable("gone"), RedisConnectionError("gone")])

    def sweep() -> None:
        swept.release()
        if error := next(errors, None):
            raise error

    sweeper = Sweeper(sweep, 0.01)
    sweeper.start()
    for _ in range(4):
        assert swept.acquire(timeout=10)
    sweeper.stop()


def test_an_ended_job_is_swept_no_more(site: Site) -> None:
    spec = site.planned(3)
    site.work(spec)
    site.control.assemble(spec.id)
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    site.control.sweep()
    assert site.queued(CONTROL_QUEUE) == site.queued(MODEL_QUEUE) == []


@pytest.mark.parametrize(
    ("slots", "leased", "left", "expected"),
    [
        (0, 0, 0, 1),
        (8, 0, 0, 8),
        (8, 3, 0, 5),
        (8, 3, 4, 5),
        (8, 3, 7, 7),
        (40, 0, 0, 25),
        (2, 2, 0, 1),
        (2, 5, 1, 1),
    ],
)
def test_tokens_are_topped_up_to_what_slots_can_take(
    site: Site, slots: int, leased: int, left: int, expected: int
) -> None:
    """Of 25 ready shards and so many in work, with `left` tokens in the queue."""
    spec = site.planned(4 * (25 + leased))
    for _ in range(leased):
        site.lease(spec)
    if slots:
        site.ledger.announce(worker("tiny", id="1", slots=slots - 1), 60)
        site.ledger.announce(worker("tiny", id="2", slots=1), 60)
        site.ledger.announce(worker("another", id="3", slots=50), 60)
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    site.tokens.work("tiny", left)
    for _ in range(3):
        site.control.sweep()
    assert len(site.queued(MODEL_QUEUE)) == expected


def test_jobs_of_one_model_share_its_tokens(site: Site) -> None:
    for _ in range(3):
        site.planned(8)
    site.ledger.announce(worker("tiny", slots=4), 60)
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    site.control.sweep()
    assert len(site.queued(MODEL_QUEUE)) == 4


def test_a_sweep_takes_back_the_shards_of_the_dead(site: Site) -> None:
    spec = site.planned(12)
    leases = [site.lease(spec) for _ in range(2)]
    assert all(leases)
    let_leases_run_out(site.ledger.client, spec.id, [0])
    site.control.sweep()
    view = site.ledger.view(spec.id)
    assert view.leased == 1
    again = site.lease(spec)
    assert again is not None
    assert again.shard.index == 0


def test_a_sweep_that_meets_a_full_or_broken_broker_still_takes_back_shards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = site.planned(4)
    site.lease(spec)
    let_leases_run_out(site.ledger.client, spec.id)
    dead = site.settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    broken = Site.of(dead, site.ledger)
    broken.control.sweep()
    assert site.ledger.client.zcard(key(spec.id, "ready")) == 1


def test_a_ledger_that_does_not_answer_ends_the_sweep_with_its_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(site.ledger, "live_jobs", broken)
    with pytest.raises(RedisConnectionError):
        site.control.sweep()
