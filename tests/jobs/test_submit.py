"""Handing in a job: what cannot work is refused before any work, and handing in twice is handing in once."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from redis.exceptions import OutOfMemoryError

from jobs.broker import CONTROL_QUEUE, PLAN
from jobs.errors import (
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    LedgerFull,
    OutputTaken,
    ServiceUnreachable,
    StorageError,
    UsageError,
)
from jobs.recover import recover
from jobs.sampling import Sampling
from jobs.spec import JobSpec, OpenAIRows, RecordRows
from jobs.submit import enter, prepare
from tests.jobs.site import Site
from tests.servers import BUCKET, S3Server, ValkeyServer

DATA = b'{"q": "a"}\n{"q": "b"}\n'


def prepared(site: Site, source: str | Path, **fields: Any) -> JobSpec:
    defaults = {"model": "tiny", "rows": RecordRows(prompt_column="q"), "sampling": Sampling()}
    return prepare(str(source), stores=site.stores, settings=site.settings, **{**defaults, **fields})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an input in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(DATA)
    (tmp_path / "sub").mkdir()
    return tmp_path


def test_a_local_input_is_pinned_where_it_is_if_workers_can_read_files(site: Site, folder: Path) -> None:
    spec = prepared(site, "in.jsonl")
    assert (spec.input.files[0].url, spec.input.size) == (f"file://{folder}/in.jsonl", len(DATA))
    assert spec.input.files[0].etag == site.stores.head(spec.input.files[0].url).etag
    assert spec.output_url == f"{spec.layout.root}/output.jsonl"
    assert spec.error_url == f"{spec.layout.root}/output.errors.jsonl"


@pytest.mark.parametrize("kind", ["moto", "rclone"])
def test_a_local_input_is_uploaded_if_the_storage_is_a_bucket(
    kind: str, site: Site, folder: Path, request: pytest.FixtureRequest
) -> None:
    s3: S3Server = request.getfixturevalue(f"{kind}_s3")
    settings = s3.settings(redis_url=site.settings.redis_url, storage=f"s3://{BUCKET}/{uuid4().hex}/")
    bucket = Site.of(settings, site.ledger)
    spec = prepared(bucket, folder / "in.jsonl")
    assert spec.input.files[0].url == spec.layout.input(0, ".jsonl")
    assert bucket.stores.read(spec.input.files[0].url, etag=spec.input.files[0].etag) == DATA


def test_standard_input_is_kept_with_the_job(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(DATA)))
    spec = prepared(site, "-")
    assert spec.input.files[0].url == spec.layout.input(0, ".jsonl")
    assert site.stores.read(spec.input.files[0].url) == DATA


@pytest.mark.parametrize("source", ["../in.jsonl", "./../in.jsonl"])
def test_paths_are_resolved_from_the_working_folder(
    site: Site, folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "sub")
    spec = prepared(site, source, output="../out.jsonl")
    assert (spec.input.files[0].url, spec.output_url) == (f"file://{folder}/in.jsonl", f"file://{folder}/out.jsonl")


def test_a_name_is_taken_literally(site: Site, folder: Path) -> None:
    (folder / "a?b#c %20.jsonl").write_bytes(DATA)
    for source in ("a?b#c %20.jsonl", f"file://{folder}/a?b#c %20.jsonl"):
        assert prepared(site, source).input.files[0].url == f"file://{folder}/a?b#c %20.jsonl"


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("missing.jsonl", "input_not_found", "no file missing.jsonl"),
        ("in.jsonl/x", "input_not_found", "no file"),
        ("sub", "input_not_found", "sub has no files"),
        ("empty.jsonl", "empty_file", "is empty"),
        ("gs://bucket/key", "usage", "no storage for gs://"),
        ("file://another-host/x", "usage", "not a file URL of this machine"),
        ("s3://", "usage", "not an S3 URL"),
        ("s3://bucket", "usage", "names a bucket"),
        ("file:///a/../b", "usage", "contains '..'"),
    ],
)
def test_an_input_that_cannot_be_is_refused(site: Site, folder: Path, source: str, code: str, words: str) -> None:
    (folder / "empty.jsonl").touch()
    with pytest.raises(UsageError, match=words) as caught:
        prepared(site, source)
    assert caught.value.code == code
    assert site.ledger.job_ids(1) == []


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("sub", "sub is a folder"),
        ("in.jsonl", "would overwrite the input"),
        ("sub/../in.jsonl", "would overwrite the input"),
        ("in.jsonl/out.jsonl", "is no folder"),
        ("gs://bucket/key", "no storage for gs://"),
        ("s3://bucket", "names a bucket"),
        ("file://another-host/x", "not a file URL of this machine"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_any_work(site: Site, folder: Path, output: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        prepared(site, "in.jsonl", output=output)
    assert (folder / "in.jsonl").read_bytes() == DATA


def test_an_output_in_a_folder_without_the_right_to_write_is_refused(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, and tests may be run by root.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="cannot be written"):
        prepared(site, "in.jsonl", output="sub/new/out.jsonl")


def test_a_bucket_that_does_not_answer_or_refuses_is_named(
    site: Site, folder: Path, rclone_s3: S3Server, moto_s3: S3Server
) -> None:
    def at(server: S3Server, **fields: Any) -> Site:
        settings = server.settings(redis_url=site.settings.redis_url, storage="s3://no-such-bucket/x")
        return Site.of(settings.model_copy(update=fields), site.ledger)

    with pytest.raises(ServiceUnreachable, match=r"http://127\.0\.0\.1:1 does not answer"):
        prepared(at(S3Server("http://127.0.0.1:1")), f"s3://{BUCKET}/key")
    with pytest.raises(StorageError, match=f"bucket '{BUCKET}' is refused"):
        prepared(at(S3Server(rclone_s3.endpoint, access_key="WRONGKEY01")), f"s3://{BUCKET}/key")
    with pytest.raises(StorageError, match="no bucket 'no-such-bucket'"):
        prepared(at(moto_s3), "in.jsonl", output="s3://no-such-bucket/out.jsonl")
    with pytest.raises(StorageError, match="no bucket 'no-such-bucket'"):
        prepared(at(moto_s3), "in.jsonl")
    with pytest.raises(UsageError, match="no object") as caught:
        prepared(at(moto_s3), f"s3://{BUCKET}/no-such-key")
    assert caught.value.code == "input_not_found"


def test_bad_rows_fail_openai_jobs_and_cost_records_a_row_unless_told_otherwise(site: Site, folder: Path) -> None:
    assert prepared(site, "in.jsonl").on_bad_row == "skip"
    assert prepared(site, "in.jsonl", rows=OpenAIRows()).on_bad_row == "fail"
    assert prepared(site, "in.jsonl", rows=OpenAIRows(), on_bad_row="skip").on_bad_row == "skip"


def test_an_id_that_cannot_be_is_refused(site: Site, folder: Path) -> None:
    with pytest.raises(UsageError, match="id: "):
        prepared(site, "in.jsonl", job_id="../evil")


def test_a_job_is_in_storage_before_the_ledger_knows_it(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = prepared(site, "in.jsonl")

    def look(created: JobSpec) -> bool:
        assert JobSpec.model_validate_json(site.stores.read(created.layout.spec)) == spec
        raise ServiceUnreachable("gone in this moment")

    with monkeypatch.context() as patch:
        patch.setattr(site.ledger, "create", look)
        with pytest.raises(ServiceUnreachable):
            enter(spec, site.ledger, site.stores, site.tokens)
    enter(spec, site.ledger, site.stores, site.tokens)
    enter(spec, site.ledger, site.stores, site.tokens)
    assert site.ledger.job_ids(10) == [spec.id]
    assert set(site.queued(CONTROL_QUEUE)) == {(PLAN, f"('{spec.id}',)")}


# --- two jobs, one output -----------------------------------------------------------------------------------------


def entered(site: Site, spec: JobSpec) -> JobSpec:
    return enter(spec, site.ledger, site.stores, site.tokens)


@pytest.mark.parametrize("kind", ["file", "moto", "rclone"])
@pytest.mark.parametrize("output", ["out.jsonl", "out/", "out.parquet"])
def test_of_two_jobs_that_would_write_one_output_the_second_is_refused(
    kind: str, output: str, site: Site, folder: Path, request: pytest.FixtureRequest
) -> None:
    """Both looked before either was entered. Where the store has no conditional PUT as well: the ledger decides."""
    if kind != "file":
        s3: S3Server = request.getfixturevalue(f"{kind}_s3")
        prefix = f"s3://{BUCKET}/{uuid4().hex}"
        site = Site.of(s3.settings(redis_url=site.settings.redis_url, storage=prefix), site.ledger)
        output = f"{prefix}/{output}"
    first, second = prepared(site, "in.jsonl", output=output), prepared(site, "in.jsonl", output=output)
    entered(site, first)
    with pytest.raises(OutputTaken, match=f"Job {first.id} writes {first.output_url}") as caught:
        entered(site, second)
    assert (caught.value.code, caught.value.exit_code) == ("output_taken", EXIT_USAGE)
    assert site.ledger.job_ids(10) == [first.id]
    assert list(site.stores.list(f"{second.layout.root}/")) == []
    assert entered(site, first) == first


def test_two_outputs_that_share_an_error_file_are_one(site: Site, folder: Path) -> None:
    first = entered(site, prepared(site, "in.jsonl", output="out.jsonl"))
    with pytest.raises(OutputTaken, match=re.escape(first.error_url)):
        entered(site, prepared(site, "in.jsonl", output="out.parquet"))


@pytest.mark.parametrize("end", ["completed", "cancelled", "failed"])
def test_an_output_is_free_again_when_its_job_has_ended_however(end: str, site: Site, folder: Path) -> None:
    first = entered(site, prepared(site, "in.jsonl", output="out.jsonl"))
    if end == "failed":
        site.ledger.fail(first.id, [], error_count=1, error_url=None, from_state="validating")
    elif end == "cancelled":
        site.ledger.cancel(first.id)
    else:
        site.control.plan(first.id)
        site.work(first)
    second = prepared(site, "in.jsonl", output="out.jsonl")
    if end != "failed":
        with pytest.raises(OutputTaken):
            entered(site, second)
        site.control.assemble(first.id)
    assert site.ledger.state(first.id) == end
    assert entered(site, prepared(site, "in.jsonl", output="out.jsonl")).id != first.id


def test_a_hundred_submits_at_once_to_one_output_are_one_job(site: Site, folder: Path) -> None:
    specs = [prepared(site, "in.jsonl", output="out.jsonl") for _ in range(100)]

    def is_in(spec: JobSpec) -> bool:
        try:
            return entered(site, spec) == spec
        except OutputTaken:
            return False

    with ThreadPoolExecutor(8) as pool:
        found = [spec.id for spec, entry in zip(specs, pool.map(is_in, specs), strict=True) if entry]
    assert site.ledger.job_ids(None) == found
    assert len(found) == 1


def test_a_lost_job_whose_output_another_took_meanwhile_is_not_recovered(site: Site, folder: Path) -> None:
    lost = entered(site, prepared(site, "in.jsonl", output="out.jsonl"))
    site.ledger.client.flushall()
    heir = entered(site, prepared(site, "in.jsonl", output="out.jsonl"))
    with pytest.raises(OutputTaken, match=heir.id):
        recover(lost, site.ledger, site.stores, site.tokens, site.control)
    assert site.stores.head(lost.layout.spec)


# --- no room ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(valkey: ValkeyServer) -> Iterator[Callable[[float], None]]:
    """Sets how full the server is."""

    def fill(share: float) -> None:
        used = valkey.client.info("memory")["used_memory"]
        valkey.client.config_set("maxmemory", int(used / share))

    yield fill
    valkey.client.config_set("maxmemory", 0)


def test_a_ledger_that_is_three_quarters_full_takes_no_job(
    site: Site, folder: Path, full: Callable[[float], None], request: pytest.FixtureRequest
) -> None:
    s3: S3Server = request.getfixturevalue("moto_s3")
    settings = s3.settings(redis_url=site.settings.redis_url, storage=f"s3://{BUCKET}/{uuid4().hex}")
    bucket = Site.of(settings, site.ledger)
    spec = prepared(bucket, "in.jsonl")
    full(0.8)
    with pytest.raises(LedgerFull, match=r"new jobs are taken up to 75%") as caught:
        entered(bucket, spec)
    assert (caught.value.code, caught.value.exit_code) == ("ledger_full", EXIT_UNREACHABLE)
    assert site.ledger.job_ids(1) == []
    assert list(bucket.stores.list(f"{spec.layout.root}/")) == []
    full(0.5)
    assert entered(bucket, prepared(bucket, "in.jsonl")).id == site.ledger.job_ids(1)[0]


def test_a_large_input_needs_more_room_than_a_small_one(
    site: Site, folder: Path, full: Callable[[float], None]
) -> None:
    small = prepared(site, "in.jsonl")
    (file,) = small.input.files
    files = (file.model_copy(update={"size": 2**40}),)
    large = small.model_copy(update={"input": small.input.model_copy(update={"files": files})})
    full(0.7)
    with pytest.raises(LedgerFull):
        entered(site, large)
    assert entered(site, small) == small


def test_a_full_ledger_refuses_what_would_grow_and_work_goes_on_when_it_is_not(
    site: Site, folder: Path, full: Callable[[float], None]
) -> None:
    spec = site.planned(8)
    lease = site.lease(spec)
    assert lease is not None
    record = site.segment(lease)
    full(1.2)
    with pytest.raises(OutOfMemoryError):
        site.ledger.commit(lease, record)
    assert site.ledger.view(spec.id).settled == 0
    full(0.5)
    assert site.ledger.commit(lease, record) == "ok"
    assert site.ledger.view(spec.id).settled == 1
