"""What people ask of a job while it runs: slow rows, identical rows, a pause, a deadline, and its failed rows again."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import RequestError
from engine.outputs import EngineOutput, RequestOutput
from engine.sampling.params import SamplingParams
from jobs.errors import PagemillError, RowError, UsageError
from jobs.ledger import FairShare
from jobs.output import Output
from jobs.reading import json_lines
from jobs.records import SegmentRecord, Usage
from jobs.results import Completion, Outcome
from jobs.retry import retry_spec
from jobs.rows import Row
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, Terms
from jobs.submit import enter
from tests.jobs.ledgers import key
from tests.jobs.site import Site
from tests.jobs.specs import read, record_spec, request
from tests.workers.conftest import WINDOW, Bench, at_work
from tests.workers.stub_engine import Engines, answer_to, text_of
from workers import twins
from workers.host import Call
from workers.render import EngineRequest
from workers.slot import work

GREEDY = Sampling(temperature=0)


def submitted(site: Site, data: list[Any], **fields: Any) -> JobSpec:
    spec = site.submit(data, **fields)
    site.control.plan(spec.id)
    return spec


def texts(*prompts: str) -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in prompts]


def ignored(outcome: Outcome | None) -> None:
    """Hears of an outcome that the test does not wait for."""


def finished(bench: Bench, spec: JobSpec) -> list[Any]:
    """The output lines of a job that is worked off now."""
    bench.work(spec)
    bench.site.control.assemble(spec.id)
    assert bench.site.ledger.state(spec.id) == "completed"
    stores = bench.site.stores
    pieces = json_lines(stores.head(spec.output_url), spec.output, stores)
    return [json.loads(line) for line in b"".join(pieces).splitlines()]


def answer_all_but(engines: Engines, *prompts: str) -> None:
    for index, prompt in engines.last.in_flight():
        if text_of(prompt) not in prompts:
            engines.last.answer(index, answer_to(prompt))


# --- slow rows ----------------------------------------------------------------------------------------------------


def test_a_row_that_takes_too_long_is_an_error_and_the_shard_goes_on(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = submitted(bench.site, texts("a", "slow", "c", "d"), max_row_seconds=0.3)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        engines.last.begin()
        answer_all_but(engines, "slow")
        # The last row is asked when the first has left the window.
        engines.last.wait_for(2)
        answer_all_but(engines, "slow")
        engines.last.wait_until_empty()
    bench.site.control.assemble(spec.id)
    rows = bench.site.rows(spec.output_url)
    assert [row["response"] for row in rows] == ["answer to a", None, "answer to c", "answer to d"]
    assert rows[1]["error"] == {"code": "row_timeout", "message": "This row took longer than 0.3 s.", "param": None}
    assert [error["line"] for error in bench.site.rows(spec.error_url)] == [2]
    assert engines.asked == ["a", "slow", "c", "d"]


def test_rows_that_are_fast_enough_know_no_limit(bench: Bench, engines: Engines) -> None:
    spec = submitted(bench.site, texts(*"abcdefgh"), max_row_seconds=30)
    assert [row["error"] for row in finished(bench, spec)] == [None] * 8


def ask(bench: Bench, count: int) -> list[Call]:
    requests = [EngineRequest(str(n), SamplingParams()) for n in range(count)]
    return bench.context.host.submit(requests, lambda calls: None)


def test_a_row_has_all_its_time_from_when_the_engine_begins_with_it(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    calls = ask(bench, 4)
    assert [call.began_at for call in calls] == [None] * 4
    engines.last.begin("3", "1")
    assert [call.began_at is not None for call in calls] == [False, True, False, True], "in whatever order it takes"


def test_a_row_that_the_engine_has_not_begun_with_is_not_slow(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = submitted(bench.site, texts("a", "slow", "c"), max_row_seconds=0.2)
    with at_work(bench, spec):
        engines.last.wait_for(3)
        engines.last.begin("slow")
        # It is given up when its time is over; the other two have waited for longer.
        assert engines.last.wait_until(lambda prompts: prompts == ["a", "c"])
        engines.last.step()
    bench.site.control.assemble(spec.id)
    rows = bench.site.rows(spec.output_url)
    assert [row["response"] for row in rows] == ["answer to a", None, "answer to c"]


def test_a_row_that_an_engine_took_to_its_grave_has_all_its_time_again(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    (call,) = ask(bench, 1)
    engines.last.begin()
    before = call.began_at
    while_down: list[float | None] = []
    engines.on_start = lambda: while_down.append(call.began_at)
    engines.last.die()
    engines.wait_for(2)
    engines.last.wait_for(1)
    assert before is not None
    assert while_down == [None]
    engines.last.begin()
    assert call.began_at is not None
    assert call.began_at > before


# --- identical rows -----------------------------------------------------------------------------------------------

TWICE = texts("a", "b", "a", "a")


@pytest.mark.parametrize(
    ("dedupe", "sampling", "asked"),
    [
        ("off", GREEDY, "abaa"),
        ("exact", GREEDY, "ab"),
        ("exact", Sampling(temperature=0.7, seed=1), "ab"),
        ("exact", Sampling(temperature=0.7), "abaa"),
        ("exact", Sampling(), "abaa"),
        ("all", Sampling(temperature=0.7), "ab"),
    ],
)
def test_identical_rows_are_asked_once_where_that_changes_no_answer_or_is_asked_for(
    dedupe: str, sampling: Sampling, asked: str, bench: Bench, engines: Engines
) -> None:
    spec = submitted(bench.site, TWICE, dedupe=dedupe, sampling=sampling)
    assert [row["response"] for row in finished(bench, spec)] == [f"answer to {name}" for name in "abaa"]
    assert sorted(engines.asked) == sorted(asked)
    assert bench.site.ledger.view(spec.id).done == 4


def test_rows_that_differ_in_a_parameter_are_not_identical(bench: Bench, engines: Engines) -> None:
    rows = [{"prompt": "a", "max_tokens": 5}, {"prompt": "a", "max_tokens": 6}, {"prompt": "a", "max_tokens": 5}]
    spec = submitted(bench.site, rows, dedupe="exact", sampling=GREEDY)
    finished(bench, spec)
    assert len(engines.asked) == 2


def test_an_output_is_the_same_with_identical_rows_asked_once(bench: Bench) -> None:
    chats = [
        request({"messages": [{"role": "user", "content": text}], "temperature": 0}, custom_id=f"r{n}")
        for n, text in enumerate("abab")
    ]
    outputs = []
    for dedupe in ("off", "exact"):
        spec = submitted(bench.site, chats, rows=OpenAIRows(), dedupe=dedupe)
        rows = finished(bench, spec)
        assert len({row["id"] for row in rows}) == 4
        outputs.append([(row["custom_id"], row["response"]["body"]["choices"]) for row in rows])
    assert outputs[0] == outputs[1]


def test_the_errors_of_identical_rows_each_name_their_own_place(bench: Bench, engines: Engines) -> None:
    engines.rules = refusing("a")
    spec = submitted(bench.site, TWICE, dedupe="exact", sampling=GREEDY)
    finished(bench, spec)
    assert [error["line"] for error in bench.site.rows(spec.error_url)] == [1, 3, 4]
    assert sorted(engines.asked) == ["a", "b"]


def test_identical_rows_of_all_shards_are_asked_once(bench: Bench, engines: Engines) -> None:
    spec = submitted(bench.site, texts(*"abcdabcdabce"), dedupe="exact", sampling=GREEDY)
    assert [row["response"] for row in finished(bench, spec)] == [f"answer to {name}" for name in "abcdabcdabce"]
    assert sorted(engines.asked) == list("abcde")


def test_identical_rows_of_shards_in_work_at_once_are_asked_once(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = submitted(bench.site, texts(*"aabcadde"), dedupe="exact", sampling=GREEDY)
    with at_work(bench, spec), at_work(bench, spec):
        engines.last.wait_for(5)
        assert sorted(engines.asked) == list("abcde")
        engines.by_hand = False
        engines.last.step()
    assert [row["response"] for row in finished(bench, spec)] == [f"answer to {name}" for name in "aabcadde"]
    assert sorted(engines.asked) == list("abcde")


def test_what_an_abandoned_shard_asked_is_asked_by_those_who_waited(bench: Bench) -> None:
    spec = submitted(bench.site, texts("a"), dedupe="exact", sampling=GREEDY)
    row = read({"prompt": "a"}, spec)
    assert isinstance(row, Row)
    shared = bench.context.shared.of(spec)
    heard: list[Outcome | None] = []
    first, second, third = (twins.Twins("exact", shared) for _ in range(3))
    assert [one.claim(row, heard.append) for one in (first, second, third)] == ["asks", "waits", "waits"]
    first.give_up()
    assert heard == [None, None]
    assert [one.claim(row, heard.append) for one in (second, third)] == ["asks", "waits"]
    second.settle(row, Completion((), Usage()))
    assert heard[2:] == [Completion((), Usage())]
    assert first.claim(row, heard.append) == Completion((), Usage())
    second.give_up()
    assert len(heard) == 3


def test_a_request_that_killed_the_engine_does_not_kill_it_again(bench: Bench, engines: Engines) -> None:
    spec = submitted(bench.site, texts(*["poison"] * 9), dedupe="exact", sampling=GREEDY)
    codes = [row["error"] and row["error"]["code"] for row in finished(bench, spec)]
    assert codes == ["engine_error"] * 9
    times = len(engines.asked)
    other = submitted(bench.site, texts("poison"), dedupe="exact", sampling=GREEDY)
    finished(bench, other)
    assert len(engines.asked) == 2 * times


def test_jobs_do_not_share_outcomes(bench: Bench, engines: Engines) -> None:
    for _ in range(2):
        finished(bench, submitted(bench.site, texts("a", "a"), dedupe="exact", sampling=GREEDY))
    assert engines.asked == ["a", "a"]


def test_a_job_that_a_worker_has_left_long_ago_is_forgotten(bench: Bench) -> None:
    specs = [submitted(bench.site, texts("a"), dedupe="exact") for _ in range(twins._JOBS_AT_ONCE + 1)]
    kept = [bench.context.shared.of(spec) for spec in specs]
    for shared in kept:
        assert shared is not None
        assert shared.claim(b"x" * 16, ignored) == "asks"
        shared.settle(b"x" * 16, Completion((), Usage()))
    found = [shared and shared.claim(b"x" * 16, ignored) for shared in kept]
    assert [one == "asks" for one in found] == [True] + [False] * twins._JOBS_AT_ONCE
    assert bench.context.shared.of(specs[-1]) is kept[-1]


def test_outcomes_beyond_the_limit_are_not_kept_and_their_rows_are_asked_again(
    bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "MAX_BYTES", 0)
    spec = submitted(bench.site, texts(*"aaaabbbbaaaa"), dedupe="exact", sampling=GREEDY)
    assert [row["response"] for row in finished(bench, spec)] == [f"answer to {name}" for name in "aaaabbbbaaaa"]
    assert sorted(engines.asked) == list("aab")


def test_a_file_of_outcomes_that_breaks_costs_no_row(bench: Bench, engines: Engines) -> None:
    spec = submitted(bench.site, texts(*"aaaaaaaaaaaa"), dedupe="exact", sampling=GREEDY)
    shared = bench.context.shared.of(spec)
    assert shared is not None
    assert shared._outcomes._file is not None
    shared._outcomes._file.execute("DROP TABLE outcomes")
    assert [row["response"] for row in finished(bench, spec)] == ["answer to a"] * 12
    assert engines.asked == ["a"] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"prompt": "a", "stop": "b"}, {"prompt": "a", "stop": ["b", "c"]}),
        ({"prompt": "a", "logit_bias": {"1": 2}}, {"prompt": "a", "logit_bias": {"2": 1}}),
        ({"prompt": "a", "min_tokens": 1}, {"prompt": "a", "min_tokens": 2}),
        ({"prompt": "[1, 2]"}, {"prompt": [1, 2]}),
    ],
)
def test_rows_that_ask_for_something_else_have_another_digest(one: Any, other: Any) -> None:
    spec = record_spec()
    digests = {twins._request(as_row(read(record, spec))) for record in (one, other, {**one, "id": 7})}
    assert len(digests) == 2


def as_row(found: Row | RowError) -> Row:
    assert isinstance(found, Row)
    return found


# --- shares -------------------------------------------------------------------------------------------------------


def test_a_worker_shares_its_slots_among_tenants_as_its_settings_say(bench: Bench, engines: Engines) -> None:
    for tenant in ("base", "gold"):
        submitted(bench.site, [{"prompt": tenant}] * 32, tenant=tenant)
    context = replace(bench.context, share=FairShare({"gold": 3}))
    work("tiny", context)
    # Shards of four rows: of the first eight, six are the heavy tenant's.
    assert engines.asked[:32].count("gold") == 6 * 4


# --- pause and deadline -------------------------------------------------------------------------------------------


def test_a_pause_lets_the_shards_in_work_commit_and_begins_no_other(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    site, spec = bench.site, bench.site.planned(8)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        assert site.ledger.pause(spec.id) == "ok"
        assert "1 shard(s) in work are finished" in str(site.ledger.view(spec.id).reason)
        engines.last.step()
        engines.last.wait_for(1)
        engines.last.step()
    view = site.ledger.view(spec.id)
    assert (view.state, view.paused, view.settled, view.leased, view.done) == ("in_progress", True, 1, 0, 4)
    assert f"`pagemill resume {spec.id}` goes on" in str(view.reason)
    assert site.lease(spec) is None
    engines.by_hand = False
    assert site.ledger.resume(spec.id) == "ok"
    assert [row["prompt"] for row in finished(bench, spec)] == [f"question {n}" for n in range(8)]


def test_a_job_that_is_done_although_it_was_paused_ends(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = bench.site.planned(3)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        bench.site.ledger.pause(spec.id)
        engines.last.step()
    bench.site.control.assemble(spec.id)
    view = bench.site.ledger.view(spec.id)
    assert (view.state, view.paused) == ("completed", False)


def test_a_job_whose_deadline_passes_is_left_within_two_beats_and_keeps_what_is_done(
    bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, beat = bench.site, bench.site.ledger.beat
    beats: list[int] = []

    def counted(*args: Any) -> Any:
        beats.append(1)
        return beat(*args)

    spec = site.planned(12, expires_at=2**40)
    site.work(spec, shards=1)
    engines.by_hand = True
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        pass_deadline(site, spec)
        site.control.sweep()
        monkeypatch.setattr(site.ledger, "beat", counted)
        engines.last.wait_until_empty()
        assert len(beats) <= 2
    site.control.assemble(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.done, view.failed, view.remaining_url) == ("expired", 4, 0, spec.layout.remaining)
    assert [row["prompt"] for row in site.rows(spec.output_url)] == [f"question {n}" for n in range(4)]
    never_run = [f"question {n}" for n in range(4, 12)]
    assert [row["prompt"] for row in site.rows(spec.layout.remaining)] == never_run
    errors = site.rows(str(view.error_url))
    assert [(error["record"]["prompt"], error["error"]["code"]) for error in errors] == [
        (prompt, "batch_expired") for prompt in never_run
    ]
    assert site.ledger.live_jobs() == site.ledger.overdue() == []


def pass_deadline(site: Site, spec: JobSpec) -> None:
    site.ledger.client.hset(key(spec.id, "job"), "expires_at", 1)
    site.ledger.client.zadd("pm:deadlines", {spec.id: 1})


# --- failed rows again --------------------------------------------------------------------------------------------


def refusing(*prompts: str) -> Callable[[Any], EngineOutput]:
    def rules(prompt: Any) -> EngineOutput:
        if text_of(prompt) in prompts:
            return RequestOutput.rejected(0, RequestError("Not today.", code="out_of_memory"))
        return answer_to(prompt)

    return rules


def retried(bench: Bench, parent: JobSpec, **terms: Any) -> JobSpec:
    """The job that runs the failed rows of one that has ended, with its shards ready."""
    site = bench.site
    spec = retry_spec(parent, site.ledger.view(parent.id), None, Terms(**terms), site.stores)
    enter(spec, site.ledger, site.stores, site.tokens)
    site.control.plan(spec.id)
    return spec


def openai_rows(count: int) -> list[Any]:
    return [
        request({"messages": [{"role": "user", "content": f"question {n}"}]}, custom_id=f"r{n}") for n in range(count)
    ]


FAILING = ("question 1", "question 5", "question 6")
TABLE = {"output": Output(format="parquet")}
SHAPES: dict[str, tuple[Callable[[int], list[Any]], dict[str, Any]]] = {
    "records": (lambda count: [{"prompt": f"question {n}", "n": n} for n in range(count)], {}),
    "openai": (openai_rows, {"rows": OpenAIRows()}),
    "records in a table": (lambda count: [{"prompt": f"question {n}", "n": n} for n in range(count)], TABLE),
    "openai in a table": (openai_rows, {"rows": OpenAIRows(), **TABLE}),
}


def comparable(rows: list[Any]) -> list[Any]:
    """Without what tells one job's lines from another's."""
    for row in rows:
        for name in ("id", "request_id"):
            row.pop(name, None)
        if isinstance(row["response"], dict):
            row["response"].pop("request_id")
            body = row["response"]["body"]
            body = json.loads(body) if isinstance(body, str) else body
            row["response"]["body"] = {k: v for k, v in body.items() if k not in ("id", "created")}
    return rows


@pytest.mark.parametrize("shape", SHAPES)
def test_failed_rows_that_run_again_give_what_a_job_without_failures_gives(
    shape: str, bench: Bench, engines: Engines
) -> None:
    rows_of, fields = SHAPES[shape]
    site = bench.site
    undisturbed = submitted(site, rows_of(10), **fields)
    expected = finished(bench, undisturbed)
    engines.rules = refusing(*FAILING)
    parent = submitted(site, rows_of(10), **fields)
    before = [site.stores.read(parent.output_url) for _ in [finished(bench, parent)]]
    before += [site.stores.read(url) for url in (parent.error_url, parent.layout.manifest)]
    assert site.ledger.view(parent.id).failed == 3

    engines.rules, engines.asked = answer_to, []
    child = retried(bench, parent)
    found = finished(bench, child)
    assert sorted(engines.asked) == list(FAILING)
    assert comparable(found) == comparable(expected)
    view, whole = site.ledger.view(child.id), site.ledger.view(undisturbed.id)
    assert (view.done, view.failed, view.error_url, view.usage) == (10, 0, None, whole.usage)
    assert view.parent == parent.id
    after = [site.stores.read(url) for url in (parent.output_url, parent.error_url, parent.layout.manifest)]
    assert before == after


def test_a_row_that_runs_again_is_the_same_row_with_the_same_seed(bench: Bench, engines: Engines) -> None:
    engines.rules = refusing(*FAILING)
    parent = submitted(bench.site, openai_rows(10), rows=OpenAIRows())
    answered = {row["custom_id"]: row["id"] for row in finished(bench, parent)}
    refused = {row["custom_id"]: row["id"] for row in bench.site.rows(parent.error_url)}
    engines.rules = answer_to
    child = retried(bench, parent)
    assert {row["custom_id"]: row["id"] for row in finished(bench, child)} == answered | refused
    assert child.origin == parent.id


def test_rows_that_fail_again_are_failures_at_their_place_and_can_run_a_third_time(
    bench: Bench, engines: Engines
) -> None:
    engines.rules = refusing(*FAILING)
    parent = submitted(bench.site, SHAPES["records"][0](10))
    finished(bench, parent)
    engines.rules = refusing("question 5")
    child = retried(bench, parent)
    rows = finished(bench, child)
    assert [row["n"] for row in rows if row["error"]] == [5]
    assert [error["line"] for error in bench.site.rows(child.error_url)] == [6]
    engines.rules, engines.asked = answer_to, []
    grandchild = retried(bench, child)
    assert [row["response"] for row in finished(bench, grandchild)] == [f"answer to question {n}" for n in range(10)]
    assert engines.asked == ["question 5"]
    assert grandchild.origin == parent.id


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_answers_are_kept_out_of_compressed_outputs(compression: str, bench: Bench, engines: Engines) -> None:
    engines.rules = refusing(*FAILING)
    parent = submitted(bench.site, SHAPES["records"][0](10), output=Output(compression=compression))
    bench.work(parent)
    bench.site.control.assemble(parent.id)
    engines.rules, engines.asked = answer_to, []
    child = retried(bench, parent)
    bench.work(child)
    bench.site.control.assemble(child.id)
    view = bench.site.ledger.view(child.id)
    assert (view.state, view.done, view.failed) == ("completed", 10, 0)
    assert sorted(engines.asked) == list(FAILING)


def test_a_stopped_job_is_completed_by_a_retry(bench: Bench, engines: Engines) -> None:
    """Rows that were never run count as failed."""
    site = bench.site
    parent = site.planned(10)
    site.work(parent, shards=1)
    site.ledger.cancel(parent.id)
    site.control.assemble(parent.id)
    child = retried(bench, parent)
    assert [row["response"] for row in finished(bench, child)] == [
        *[f"answer {n}" for n in range(4)],
        *[f"answer to question {n}" for n in range(4, 10)],
    ]
    assert len(engines.asked) == 6


def test_a_dead_shard_of_a_retry_keeps_the_parents_answers(bench: Bench, engines: Engines) -> None:
    engines.rules = refusing("question 1")
    parent = submitted(bench.site, SHAPES["records"][0](4), max_tries=1)
    finished(bench, parent)
    child = retried(bench, parent)
    lease = bench.site.lease(child)
    assert lease is not None
    bench.site.ledger.release(lease, "the worker ran out of memory")
    rows = finished(bench, child)
    assert [row["error"] and row["error"]["code"] for row in rows] == [None, "engine_error", None, None]


def test_a_parent_whose_result_is_gone_is_named(bench: Bench, engines: Engines) -> None:
    engines.rules = refusing("question 1")
    parent = submitted(bench.site, SHAPES["records"][0](4))
    finished(bench, parent)
    child = retried(bench, parent)
    record = bench.site.ledger.records(parent.id)[0]
    assert isinstance(record, SegmentRecord)
    bench.site.stores.delete(part.url for part in record.objects(parent.layout, 0) if part)
    lease = bench.site.lease(child)
    assert lease is not None
    with pytest.raises(PagemillError, match=f"The result of job {parent.id}, .* is gone") as caught:
        bench.context.kept.of(child, lease.shard)
    assert caught.value.code == "parent_changed"


def test_what_cannot_run_again_says_why(bench: Bench, engines: Engines) -> None:
    site = bench.site

    def refused(spec: JobSpec, output: str | None = None) -> tuple[str, str]:
        with pytest.raises(UsageError) as caught:
            retry_spec(spec, site.ledger.view(spec.id), output, Terms(), site.stores)
        return caught.value.code, caught.value.message

    running = site.planned(4)
    assert refused(running) == ("not_retriable", f"Job {running.id} is in_progress.")
    finished(bench, running)
    assert refused(running) == ("nothing_to_retry", f"Job {running.id} has no failed row.")
    bad = submitted(site, [{"text": "a"}], on_bad_row="fail")
    assert refused(bad) == ("not_retriable", f"Job {bad.id} has no result: its input was refused.")
    engines.rules = refusing("question 1")
    parent = site.planned(4)
    finished(bench, parent)
    assert refused(parent, "out.parquet")[0] == "output_format"
    for url in (parent.output_url, parent.input.files[0].url):
        assert refused(parent, url) == ("usage", f"{url} belongs to job {parent.id}.")
    assert site.ledger.job_ids(10)[0] == parent.id
