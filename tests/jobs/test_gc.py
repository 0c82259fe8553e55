"""What is collected, and above all what is not: results, live jobs, lost jobs, and what is young."""

import gzip
import time
from pathlib import Path
from uuid import uuid4

import pytest

from jobs.formats.jsonl import dumps
from jobs.gc import Collector, Garbage
from jobs.ledger import Lease, Ledger
from jobs.spec import Input, InputFile, JobSpec, Parent
from jobs.storage.s3_object import split_url
from tests.jobs.commands import Command
from tests.jobs.ledgers import key
from tests.jobs.site import Site, prompts
from tests.servers import BUCKET, ValkeyServer

HOUR = 3600.0


def collector(site: Site, *, age: float = -HOUR, jobs_age: float | None = None) -> Collector:
    """One that takes what is older than `age`; by default that is everything."""
    now = time.time()
    jobs_before = None if jobs_age is None else now - jobs_age
    url = site.settings.storage_url
    return Collector(url, site.ledger, site.stores, before=now - age, jobs_before=jobs_before)


def found(site: Site, **ages: float) -> list[Garbage]:
    return list(collector(site, **ages).find())


def leased(site: Site, spec: JobSpec) -> Lease:
    lease = site.lease(spec)
    assert lease is not None
    return lease


def with_an_orphan(site: Site, spec: JobSpec) -> set[str]:
    """Another attempt at the first shard puts its segment and never commits it; the URLs of its two objects."""
    lease = leased(site, spec)
    site.segment(lease)
    site.ledger.give_back(lease)
    layout = spec.layout
    names = (lease.shard.index, lease.fence, lease.attempt)
    return {layout.segment(*names), layout.record(*names)}


def completed(site: Site, spec: JobSpec) -> None:
    site.work(spec)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"


def objects(site: Site, spec: JobSpec) -> set[str]:
    return {info.url for info in site.stores.list(f"{spec.layout.root}/")}


def test_a_segment_that_is_not_the_result_goes_and_the_result_stays(any_site: Site) -> None:
    spec = any_site.planned(8)
    orphans = with_an_orphan(any_site, spec)
    completed(any_site, spec)
    before = objects(any_site, spec)
    assert orphans < before
    gone = list(collector(any_site).collect())
    assert {one.what.url for one in gone} == orphans
    assert {(one.kind, one.job_id) for one in gone} == {("segment", spec.id)}
    assert all(one.what.size > 0 for one in gone)
    assert objects(any_site, spec) == before - orphans
    assert found(any_site) == []


def test_what_is_young_stays(any_site: Site) -> None:
    spec = any_site.planned(8)
    with_an_orphan(any_site, spec)
    completed(any_site, spec)
    any_site.stores.put(f"{any_site.settings.storage_url}/jobs/half/input.jsonl", b"{}\n")
    assert found(any_site, age=HOUR) == []


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing", "cancelling"])
def test_a_live_job_is_left_alone(site: Site, state: str) -> None:
    spec = site.planned(8)
    with_an_orphan(site, spec)
    site.ledger.client.hset(key(spec.id, "job"), "state", state)
    assert found(site, jobs_age=-HOUR) == []


def test_a_job_that_the_ledger_does_not_know_is_left_to_recover(site: Site) -> None:
    spec = site.planned(8)
    with_an_orphan(site, spec)
    site.ledger.client.flushall()
    assert found(site, jobs_age=-HOUR) == []


def test_a_failed_job_keeps_what_it_had_committed(site: Site) -> None:
    spec = site.planned(8)
    orphans = with_an_orphan(site, spec)
    site.work(spec, shards=1)
    site.ledger.fail(spec.id, [], error_count=1, error_url=None, from_state="in_progress")
    assert {one.what.url for one in found(site)} == orphans


def test_the_errors_of_a_dead_shard_are_results(site: Site) -> None:
    spec = site.planned(4, max_tries=1)
    lease = leased(site, spec)
    site.ledger.release(lease, "the machine burnt")
    assert site.lease(spec) is None
    site.control.assemble(spec.id)
    assert site.ledger.view(spec.id).failed == 4
    assert found(site) == []


def test_a_submit_that_broke_off_leaves_nothing(any_site: Site) -> None:
    url = f"{any_site.settings.storage_url}/jobs/half/input.jsonl"
    any_site.stores.put(url, b"{}\n")
    any_site.stores.put(f"{any_site.settings.storage_url}/doctor/123", b"pagemill")
    kinds = {(one.kind, one.job_id) for one in collector(any_site).collect()}
    assert kinds == {("submit", "half"), ("probe", None)}
    assert list(any_site.stores.list(f"{any_site.settings.storage_url}/jobs/half/")) == []


def test_a_job_that_ended_long_ago_goes_as_a_whole_if_asked(any_site: Site) -> None:
    old, young = any_site.planned(8), any_site.planned(8)
    for spec in (old, young):
        completed(any_site, spec)
    any_site.ledger.client.hset(key(old.id, "job"), "completed_at", int(time.time() - 2 * HOUR))
    result = any_site.stores.read(old.output_url)
    assert found(any_site) == []
    gone = list(collector(any_site, jobs_age=HOUR).collect())
    assert {(one.kind, one.job_id) for one in gone} == {("job", old.id)}
    assert gone[0].what.url == old.layout.spec
    assert objects(any_site, old) == set()
    assert any_site.ledger.job_ids(None) == [young.id]
    assert any_site.ledger.client.keys(key(old.id, "*")) == []
    assert any_site.stores.read(old.output_url) == result
    assert any_site.ledger.state(young.id) == "completed"


def test_a_removal_that_crashed_is_finished_by_the_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.planned(8)
    completed(site, spec)
    delete, calls = site.stores.delete, []

    def crash_after_the_spec(urls: list[str]) -> None:
        delete(urls)
        calls.append(urls)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.stores, "delete", crash_after_the_spec)
        with pytest.raises(KeyboardInterrupt):
            list(collector(site, jobs_age=-HOUR).collect())
    assert calls == [[spec.layout.spec]]
    list(collector(site, jobs_age=-HOUR).collect())
    assert objects(site, spec) == set()
    assert site.ledger.job_ids(None) == []


def test_a_job_that_another_retries_is_kept(site: Site) -> None:
    parent = site.planned(4)
    completed(site, parent)
    child = Parent(job_id=parent.id, storage_url=parent.storage_url, origin=parent.id)
    site.submit(prompts(4), parent=child)
    assert found(site, jobs_age=-HOUR) == []


def test_a_job_whose_rest_a_live_one_works_on_is_kept(site: Site) -> None:
    cancelled = site.planned(8)
    site.ledger.cancel(cancelled.id)
    site.control.assemble(cancelled.id)
    rest = site.stores.head(cancelled.layout.remaining)
    again = site.submit(prompts(1), input=Input(files=(InputFile(url=rest.url, size=rest.size, etag=rest.etag),)))
    assert [one for one in found(site, jobs_age=-HOUR) if one.kind == "job"] == []
    site.control.plan(again.id)
    completed(site, again)
    assert {one.job_id for one in found(site, jobs_age=-HOUR) if one.kind == "job"} == {cancelled.id, again.id}


def test_a_copy_of_the_input_that_was_not_used_goes(site: Site) -> None:
    """The planner's own copy of a compressed input stays."""
    data = gzip.compress(b"".join(dumps(row) + b"\n" for row in prompts(6)))
    info = site.stores.put(f"{site.settings.storage_url}/in.jsonl.gz", data)
    file = InputFile(url=info.url, size=info.size, etag=info.etag, compression="gzip")
    spec = site.submit(prompts(1), input=Input(files=(file,)))
    site.control.plan(spec.id)
    completed(site, spec)
    unused = spec.layout.copy_of_input("another", ".jsonl")
    used = {info.url for info in site.stores.list(spec.layout.inputs)}
    assert len(used) == 1
    site.stores.put(unused, b"{}\n")
    assert [(one.kind, one.what.url) for one in found(site)] == [("input", unused)]


def test_a_live_job_cannot_be_forgotten(site: Site) -> None:
    spec = site.planned(4)
    assert site.ledger.forget(spec.id) == "in_progress"
    assert site.ledger.view(spec.id).shards == 1


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_an_upload_that_was_never_completed_is_aborted(
    server: str, valkey: ValkeyServer, request: pytest.FixtureRequest
) -> None:
    s3 = request.getfixturevalue(f"{server}_s3")
    site = Site.of(s3.settings(redis_url=valkey.url, storage=f"s3://{BUCKET}/{uuid4().hex}"), Ledger(valkey.client))
    client = s3.client()
    live = site.planned(4)
    ended = site.planned(4)
    completed(site, ended)
    uploads = {}
    for spec in (live, ended):
        bucket, name = split_url(spec.layout.output(".jsonl"))
        uploads[spec.id] = client.create_multipart_upload(Bucket=bucket, Key=name)["UploadId"]
        client.upload_part(Bucket=bucket, Key=name, UploadId=uploads[spec.id], PartNumber=1, Body=b"x" * 1000)
    if server == "rclone":  # moto gives all uploads one date
        assert found(site, age=HOUR) == []
    (write,) = collector(site).collect()
    assert (write.kind, write.job_id, write.what.url, write.what.size) == (
        "write",
        ended.id,
        ended.layout.output(".jsonl"),
        1000,
    )
    assert found(site) == []
    bucket, name = split_url(live.layout.output(".jsonl"))
    client.abort_multipart_upload(Bucket=bucket, Key=name, UploadId=uploads[live.id])


def test_a_temporary_file_of_a_writer_that_died_is_removed(site: Site) -> None:
    live, spec = site.planned(4), site.planned(4)
    completed(site, spec)
    for one in (live, spec):
        (Path(one.layout.root.removeprefix("file://")) / ".pagemill-tmp-0123").write_bytes(b"half")
    (write,) = collector(site).collect()
    assert (write.kind, write.job_id, write.what.size) == ("write", spec.id, 4)
    assert Path(write.what.url.removeprefix("file://")).parent.name == spec.id
    assert found(site) == []


def test_the_command_lists_and_removes(site: Site, pagemill: Command) -> None:
    spec = site.planned(8)
    orphans = with_an_orphan(site, spec)
    completed(site, spec)
    assert pagemill("gc").out == "There is nothing to remove.\n"
    listed = pagemill("gc", "--dry-run", "--older-than", "0s", "--json").json
    assert {item["url"] for item in listed["items"]} == orphans
    assert listed["totals"]["segment"]["count"] == 2
    assert listed["totals"]["segment"]["size"] == sum(item["size"] for item in listed["items"]) > 0
    assert orphans < objects(site, spec)
    assert next(iter(orphans)) in pagemill("gc", "--dry-run", "--older-than", "0s").out
    assert "freed" in pagemill("gc", "--older-than", "0s").out
    assert not orphans & objects(site, spec)
    bad = pagemill("gc", "--older-than", "soon")
    assert (bad.code, "'soon' is no length of time" in bad.err) == (2, True)
