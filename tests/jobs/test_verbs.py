"""Stopping, holding and submitting twice: what a job's files and the ledger say then."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from jobs.broker import ASSEMBLE, CONTROL_QUEUE, WORK, model_queue
from jobs.errors import IdempotencyConflict, UsageError
from jobs.spec import JobSpec, OpenAIRows, RecordRows, Terms, job_id_of
from jobs.submit import enter, prepare
from tests.jobs.ledgers import key, worker
from tests.jobs.site import Site, prompts
from tests.jobs.specs import request
from tests.servers import BUCKET, S3Server

KEY = "nightly-2026-08-01"


def stop(site: Site, spec: JobSpec, how: str) -> None:
    """The job ends before it is done, in one of the two ways."""
    if how == "cancelled":
        assert site.ledger.cancel(spec.id) == "ok"
    else:
        site.ledger.client.hset(key(spec.id, "job"), "expires_at", 1)
        site.ledger.client.zadd("pm:deadlines", {spec.id: 1})
        site.control.sweep()
        assert (ASSEMBLE, f"('{spec.id}',)") in site.queued(CONTROL_QUEUE)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == how


# --- what a stopped job leaves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_each_row_of_a_stopped_job_is_in_the_output_or_among_the_errors(any_site: Site, how: str) -> None:
    data: list[Any] = [{"prompt": f"question {n}"} if n % 6 else {"text": n} for n in range(18)]
    spec = any_site.submit(data, expires_at=2**40)
    any_site.control.plan(spec.id)
    leases = [any_site.lease(spec) for _ in range(4)]
    for place in (0, 3):
        lease = leases[place]
        assert lease is not None
        any_site.ledger.commit(lease, any_site.segment(lease))
    stop(any_site, spec, how)
    view = any_site.ledger.view(spec.id)
    assert (view.state, view.done, view.failed) == (how, 6, 2)
    never_run = [*range(4, 12), 16, 17]
    errors = any_site.rows(str(view.error_url))
    assert [error["line"] - 1 for error in errors] == [0, *never_run[:8], 12, *never_run[8:]]
    assert [error["line"] - 1 for error in errors if error["error"]["code"] == f"batch_{how}"] == never_run
    assert any_site.rows(spec.layout.remaining) == [data[n] for n in never_run]
    assert [row.get("prompt") for row in any_site.rows(spec.output_url)] == [
        data[n].get("prompt") for n in (0, 1, 2, 3, 12, 13, 14, 15)
    ]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("expired", "This request could not be executed before the completion window expired."),
        ("cancelled", "This request could not be executed before the batch was cancelled."),
    ],
)
def test_an_openai_row_that_was_never_run_has_an_error_and_no_response(site: Site, how: str, message: str) -> None:
    spec = site.submit([request(custom_id="r1")], rows=OpenAIRows(), expires_at=2**40)
    site.control.plan(spec.id)
    stop(site, spec, how)
    (line,) = site.rows(spec.error_url)
    assert (line["custom_id"], line["response"]) == ("r1", None)
    assert line["error"] == {"code": f"batch_{how}", "message": message}


def test_a_job_that_expires_before_it_is_planned_leaves_its_input(site: Site) -> None:
    spec = site.submit(prompts(5), expires_at=2**40)
    stop(site, spec, "expired")
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.error_url) == ("expired", None)
    assert site.rows(spec.layout.remaining) == prompts(5)


def test_a_job_without_work_left_completes_though_its_deadline_passes(site: Site) -> None:
    spec = site.planned(4, expires_at=2**40)
    site.work(spec)
    site.ledger.client.hset(key(spec.id, "job"), "expires_at", 1)
    site.ledger.client.zadd("pm:deadlines", {spec.id: 1})
    site.control.sweep()
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"
    assert site.ledger.overdue() == []


def test_a_deadline_that_is_yet_to_come_ends_nothing(site: Site) -> None:
    spec = site.planned(4, expires_at=2**40)
    site.control.sweep()
    assert (site.ledger.state(spec.id), site.ledger.view(spec.id).expires_at) == ("in_progress", 2**40)


def test_an_expired_job_that_lost_a_segment_does_not_run_on(any_site: Site) -> None:
    spec = any_site.planned(8, expires_at=2**40)
    any_site.work(spec, shards=1)
    (record,) = any_site.ledger.records(spec.id).values()
    any_site.stores.delete(part.url for part in record.objects(spec.layout, 0) if part)  # type: ignore[union-attr]
    stop(any_site, spec, "expired")
    assert any_site.rows(spec.layout.remaining) == prompts(8)


# --- pause --------------------------------------------------------------------------------------------------------


def test_a_paused_job_gets_no_tokens_and_no_leases_until_it_is_resumed(site: Site) -> None:
    site.ledger.announce(worker("tiny", slots=8), ttl=60)
    spec = site.planned(8)
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    assert site.ledger.pause(spec.id) == "ok"
    site.control.sweep()
    assert site.queued(model_queue("tiny")) == []
    assert site.lease(spec) is None
    assert site.ledger.resume(spec.id) == "ok"
    site.control.sweep()
    assert site.queued(model_queue("tiny")) == [(WORK, "('tiny',)")] * 2
    assert site.lease(spec) is not None


def test_a_job_can_be_paused_before_it_is_planned(site: Site) -> None:
    spec = site.submit(prompts(4))
    site.ledger.pause(spec.id)
    site.control.plan(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.paused, view.shards) == ("in_progress", True, 1)
    assert site.lease(spec) is None


def test_a_lease_that_runs_out_while_a_job_is_paused_waits_for_the_resume(site: Site) -> None:
    spec = site.planned(4)
    lease = site.lease(spec)
    assert lease is not None
    site.ledger.pause(spec.id)
    site.ledger.client.zadd(key(spec.id, "leases"), {"0": 1})
    assert site.ledger.expire(spec.id) == (1, 0, 0)
    assert site.lease(spec) is None
    site.ledger.resume(spec.id)
    assert site.lease(spec) is not None


def test_a_job_that_was_paused_and_is_done_runs_a_lost_shard_again(site: Site) -> None:
    spec = site.planned(4)
    lease = site.lease(spec)
    assert lease is not None
    site.ledger.pause(spec.id)
    record = site.segment(lease)
    assert site.ledger.commit(lease, record) == "ok"
    assert site.ledger.reopen(spec, 0, record)
    assert site.lease(spec) is not None


def test_an_expired_job_s_shards_do_not_run_again(site: Site) -> None:
    spec = site.planned(8, expires_at=2**40)
    lease = site.lease(spec)
    assert lease is not None
    record = site.segment(lease)
    site.ledger.commit(lease, record)
    site.ledger.client.hset(key(spec.id, "job"), "expires_at", 1)
    assert site.ledger.expire_job(spec.id) == "ok"
    assert not site.ledger.reopen(spec, 0, record)


def test_other_jobs_run_while_one_is_paused(site: Site) -> None:
    held, other = site.planned(8, priority=9), site.planned(8)
    site.ledger.pause(held.id)
    site.work(other)
    assert (site.ledger.state(held.id), site.ledger.state(other.id)) == ("in_progress", "finalizing")


def test_a_paused_job_can_be_cancelled(site: Site) -> None:
    spec = site.planned(8)
    site.ledger.pause(spec.id)
    stop(site, spec, "cancelled")
    assert not site.ledger.view(spec.id).paused


# --- the same key -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(b'{"q": "a"}\n')
    (tmp_path / "same.jsonl").write_bytes(b'{"q": "a"}\n')
    (tmp_path / "other.jsonl").write_bytes(b'{"q": "b"}\n')
    return tmp_path


def submit(site: Site, source: str = "in.jsonl", terms: Terms = Terms(), **fields: Any) -> JobSpec:
    shape = {"model": "tiny", "rows": RecordRows(prompt_column="q"), **fields}
    spec = prepare(source, stores=site.stores, settings=site.settings, terms=terms, idempotency_key=KEY, **shape)
    return enter(spec, site.ledger, site.stores, site.tokens)


def in_bucket(site: Site, s3: S3Server) -> Site:
    settings = s3.settings(redis_url=site.settings.redis_url, storage=f"s3://{BUCKET}/{uuid4().hex}")
    return Site.of(settings, site.ledger)


def test_the_same_key_gives_the_same_job(site: Site, folder: Path) -> None:
    first = submit(site)
    assert first.id == job_id_of("default", KEY)
    assert submit(site) == submit(site, "same.jsonl") == first
    assert site.ledger.job_ids(10) == [first.id]


def test_the_first_submission_s_deadline_stands(site: Site, folder: Path) -> None:
    first = submit(site, terms=Terms(expires_at=2**40))
    assert submit(site, terms=Terms(expires_at=2**41)) == first


@pytest.mark.parametrize(
    "change",
    [
        {"source": "other.jsonl"},
        {"model": "another"},
        {"terms": Terms(priority=3)},
        {"rows": RecordRows(prompt_column="q", system="Be brief.")},
        {"output": "elsewhere.jsonl"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_job_under_the_same_key_is_a_conflict(site: Site, folder: Path, change: dict[str, Any]) -> None:
    first = submit(site)
    with pytest.raises(IdempotencyConflict, match=f"Job {first.id} was submitted under this idempotency key"):
        submit(site, **change)
    assert site.ledger.job_ids(10) == [first.id]


def test_tenants_do_not_share_keys(site: Site, folder: Path) -> None:
    assert submit(site, terms=Terms(tenant="a")).id != submit(site, "other.jsonl", terms=Terms(tenant="b")).id


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_a_job_s_uploaded_input_survives_other_submissions_under_its_key(
    kind: str, site: Site, folder: Path, request: pytest.FixtureRequest
) -> None:
    bucket = in_bucket(site, request.getfixturevalue(f"{kind}_s3"))
    first = submit(bucket)
    assert submit(bucket) == first
    (folder / "in.jsonl").write_bytes(b'{"q": "c"}\n')
    with pytest.raises(IdempotencyConflict):
        submit(bucket)
    (file,) = first.input.files
    assert bucket.stores.read(file.url, etag=file.etag) == b'{"q": "a"}\n'
    assert [info.url for info in bucket.stores.list(f"{first.layout.root}/in/")] == [file.url]


def test_standard_input_is_compared_by_what_it_says(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(data: bytes) -> JobSpec:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        return submit(site, "-")

    first = piped(b'{"q": "a"}\n')
    assert piped(b'{"q": "a"}\n') == first
    with pytest.raises(IdempotencyConflict):
        piped(b'{"q": "b"}\n')
    site.control.plan(first.id)
    assert site.ledger.state(first.id) == "in_progress"


def test_an_output_folder_that_the_job_has_filled_is_no_obstacle_to_its_own_key(site: Site, folder: Path) -> None:
    first = submit(site, output="out/")
    (folder / "out").mkdir()
    (folder / "out" / "part-00000.jsonl").touch()
    assert submit(site, output="out/") == first
    with pytest.raises(UsageError, match="is not empty"):
        prepare(
            "in.jsonl",
            stores=site.stores,
            settings=site.settings,
            model="tiny",
            rows=RecordRows(prompt_column="q"),
            output="out/",
        )
