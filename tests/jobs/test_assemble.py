"""The end of a job, in each kind of store: its files are its shards' segments in order, whoever puts them together."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from jobs.assemble import assemble
from jobs.output import errors_beside
from jobs.records import Manifest, SegmentRecord
from jobs.spec import JobSpec
from tests.jobs.site import Site, prompts

MIXED = [{"prompt": f"question {n}"} if n % 5 else {"text": n} for n in range(10)]


class Crashed(Exception):
    """The process is gone."""


def crash(*args: Any, **fields: Any) -> None:
    raise Crashed


def manifest(site: Site, spec: JobSpec) -> Manifest:
    return Manifest.model_validate_json(site.stores.read(spec.layout.manifest))


def finalizing(site: Site, data: list[Any], **fields: Any) -> JobSpec:
    spec = site.submit(data, **fields)
    site.control.plan(spec.id)
    site.work(spec)
    assert site.ledger.state(spec.id) == "finalizing"
    return spec


def objects_of(site: Site, spec: JobSpec, shard: int) -> list[str]:
    record = site.ledger.records(spec.id)[shard]
    assert isinstance(record, SegmentRecord)
    return [part.url for part in record.objects(spec.layout, shard) if part]


def test_the_output_has_every_row_in_the_order_of_the_input(any_site: Site) -> None:
    spec = finalizing(any_site, MIXED)
    any_site.control.assemble(spec.id)
    rows = any_site.rows(spec.output_url)
    assert [{name: row[name] for name in source} for row, source in zip(rows, MIXED, strict=True)] == MIXED
    assert [row["response"] for row in rows] == [f"answer {n}" if n % 5 else None for n in range(10)]
    assert [row["line"] for row in any_site.rows(spec.error_url)] == [1, 6]
    view = any_site.ledger.view(spec.id)
    assert (view.state, view.done, view.failed) == ("completed", 8, 2)
    assert (view.output_url, view.error_url) == (spec.output_url, spec.error_url)
    truth = manifest(any_site, spec)
    assert (truth.rows, truth.ok, truth.failed, truth.output.lines) == (10, 8, 2, 10)
    assert truth.errors is not None
    assert (truth.errors.lines, truth.usage.prompt_tokens) == (2, 24)
    assert [(segment.shard, segment.first_row, segment.rows) for segment in truth.segments] == [
        (0, 0, 4),
        (1, 4, 4),
        (2, 8, 2),
    ]


def test_shards_that_were_settled_in_any_order_are_joined_in_the_input_s(any_site: Site) -> None:
    spec = any_site.planned(10)
    leases = [any_site.lease(spec) for _ in range(3)]
    for lease in reversed(leases):
        assert lease is not None
        any_site.ledger.commit(lease, any_site.segment(lease))
    any_site.control.assemble(spec.id)
    assert [row["response"] for row in any_site.rows(spec.output_url)] == [f"answer {n}" for n in range(10)]


@pytest.mark.parametrize("step", ["concat", "put_if_absent", "finish"])
def test_an_assembler_that_crashed_is_repeated_to_the_same_bytes(
    any_site: Site, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is done, and the process gone before the next."""
    spec = finalizing(any_site, MIXED)
    owner = any_site.ledger if step == "finish" else any_site.stores
    act = getattr(owner, step)

    def crash_after(*args: Any, **fields: Any) -> None:
        act(*args, **fields)
        raise Crashed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, crash_after)
        with pytest.raises(Crashed):
            any_site.control.assemble(spec.id)
    before = any_site.stores.read(spec.output_url)
    truth = any_site.stores.read(spec.layout.manifest) if step != "concat" else None
    any_site.control.assemble(spec.id)
    any_site.control.assemble(spec.id)
    assert any_site.ledger.state(spec.id) == "completed"
    assert any_site.stores.read(spec.output_url) == before
    assert truth in (None, any_site.stores.read(spec.layout.manifest))
    assert len(any_site.rows(spec.output_url)) == 10


def test_two_assemblers_at_once_write_one_manifest_and_the_same_files(any_site: Site) -> None:
    """As when one was taken for dead, and the lock went to another."""
    spec = finalizing(any_site, MIXED)
    together = threading.Barrier(2)

    def keep_step() -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(5)

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(assemble, spec, any_site.ledger, any_site.stores, keep_step) for _ in range(2)]
    assert [run.result() for run in runs] == [None, None]
    assert any_site.ledger.state(spec.id) == "completed"
    truth = manifest(any_site, spec)
    assert [segment.record for segment in truth.segments] == list(any_site.ledger.records(spec.id).values())
    assert len(any_site.rows(spec.output_url)) == 10
    found = [info.url for info in any_site.stores.list(f"{spec.layout.root}/manifest")]
    assert found == [spec.layout.manifest]


def test_a_manifest_that_is_there_is_the_truth(any_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = finalizing(any_site, MIXED)
    with monkeypatch.context() as patch:
        patch.setattr(any_site.ledger, "finish", crash)
        with pytest.raises(Crashed):
            any_site.control.assemble(spec.id)
    another = manifest(any_site, spec).model_copy(update={"engines": ("another assembler's",)})
    any_site.stores.put(spec.layout.manifest, another.model_dump_json().encode())
    any_site.control.assemble(spec.id)
    assert manifest(any_site, spec) == another
    assert any_site.ledger.state(spec.id) == "completed"


@pytest.mark.parametrize("loss", ["deleted", "truncated", "overwritten"])
def test_a_shard_whose_segment_is_gone_runs_again(any_site: Site, loss: str) -> None:
    spec = finalizing(any_site, MIXED)
    url = objects_of(any_site, spec, 1)[0]
    data = any_site.stores.read(url)
    match loss:
        case "deleted":
            any_site.stores.delete([url])
        case "truncated":
            any_site.stores.put(url, data[:-1])
        case "overwritten":
            any_site.stores.put(url, data.replace(b"answer", b"ANSWER"))
    any_site.control.assemble(spec.id)
    view = any_site.ledger.view(spec.id)
    assert (view.state, view.settled, view.done, view.failed) == ("in_progress", 2, 5, 1)
    any_site.work(spec)
    any_site.control.assemble(spec.id)
    assert any_site.ledger.state(spec.id) == "completed"
    assert [row["response"] for row in any_site.rows(spec.output_url)] == [
        f"answer {n}" if n % 5 else None for n in range(10)
    ]


def test_a_dead_shard_gives_an_error_for_each_of_its_rows(any_site: Site) -> None:
    spec = any_site.submit(MIXED, max_tries=2)
    any_site.control.plan(spec.id)
    for _ in range(2):
        lease = any_site.lease(spec)
        assert lease is not None
        assert any_site.ledger.release(lease, "the worker ran out of memory")
    any_site.work(spec)
    any_site.control.assemble(spec.id)
    view = any_site.ledger.view(spec.id)
    assert view.state == "completed"
    rows = any_site.rows(spec.output_url)
    assert len(rows) == 10
    assert [row["error"] and row["error"]["code"] for row in rows] == [
        "missing_required_parameter",
        *["engine_error"] * 3,
        None,
        "missing_required_parameter",
        *[None] * 4,
    ]
    assert [row["line"] for row in any_site.rows(spec.error_url)] == [1, 2, 3, 4, 6]
    truth = manifest(any_site, spec)
    assert (truth.ok, truth.failed) == (5, 5)
    assert (view.done, view.failed) == (5, 5)


def test_a_cancelled_job_keeps_what_is_done_and_leaves_the_rest_to_submit(any_site: Site) -> None:
    spec = any_site.planned(18)
    any_site.work(spec, shards=1)
    lost = any_site.lease(spec)
    any_site.work(spec, shards=2)
    assert lost is not None
    assert any_site.ledger.cancel(spec.id) == "ok"
    assert any_site.ledger.commit(lost, any_site.segment(lost)) == "stop"
    any_site.control.assemble(spec.id)
    view = any_site.ledger.view(spec.id)
    assert (view.state, view.done, view.remaining_url) == ("cancelled", 12, spec.layout.remaining)
    done = any_site.rows(spec.output_url)
    remaining = any_site.rows(spec.layout.remaining)
    assert [row["prompt"] for row in done] == [f"question {n}" for n in [0, 1, 2, 3, *range(8, 16)]]
    assert sorted([{"prompt": row["prompt"]} for row in done] + remaining, key=str) == sorted(prompts(18), key=str)
    truth = manifest(any_site, spec)
    assert (truth.state, truth.rows, truth.ok, len(truth.segments)) == ("cancelled", 18, 12, 3)


def test_a_job_that_is_cancelled_before_it_is_planned_leaves_its_input(any_site: Site) -> None:
    spec = any_site.submit(prompts(5))
    any_site.ledger.cancel(spec.id)
    any_site.control.plan(spec.id)
    any_site.control.assemble(spec.id)
    assert any_site.ledger.state(spec.id) == "cancelled"
    assert any_site.stores.read(spec.layout.remaining) == any_site.stores.read(spec.input.files[0].url)
    assert any_site.stores.read(spec.output_url) == b""


def test_a_cancelled_job_whose_input_changed_keeps_what_is_done(any_site: Site) -> None:
    spec = any_site.planned(8)
    any_site.work(spec, shards=1)
    any_site.ledger.cancel(spec.id)
    any_site.stores.put(spec.input.files[0].url, b'{"prompt": "another"}\n')
    any_site.control.assemble(spec.id)
    view = any_site.ledger.view(spec.id)
    assert (view.state, view.done, view.remaining_url) == ("cancelled", 4, None)
    assert len(any_site.rows(spec.output_url)) == 4
    assert list(any_site.stores.list(spec.layout.remaining)) == []


def test_the_remaining_rows_of_a_file_with_blank_lines_and_no_last_newline_are_whole(site: Site) -> None:
    data = (
        b'\n{"prompt": "0"}\r\n\n{"prompt": "1"}\n{"prompt": "2"}\n{"prompt": "3"}\n\n{"prompt": "4"}\n{"prompt": "5"}'
    )
    spec = site.submit(data)
    site.control.plan(spec.id)
    site.work(spec, shards=1)
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    assert site.stores.read(spec.layout.remaining).split() == [b'{"prompt":', b'"4"}', b'{"prompt":', b'"5"}']


def test_a_segment_that_vanished_from_a_cancelled_job_is_among_the_rest(any_site: Site) -> None:
    spec = any_site.planned(12)
    any_site.work(spec, shards=2)
    any_site.stores.delete(objects_of(any_site, spec, 0))
    any_site.ledger.cancel(spec.id)
    any_site.control.assemble(spec.id)
    assert any_site.ledger.state(spec.id) == "cancelled"
    assert [row["prompt"] for row in any_site.rows(spec.output_url)] == [f"question {n}" for n in range(4, 8)]
    assert [row["prompt"] for row in any_site.rows(spec.layout.remaining)] == [
        f"question {n}" for n in [0, 1, 2, 3, *range(8, 12)]
    ]
    truth = manifest(any_site, spec)
    assert (truth.ok, any_site.ledger.view(spec.id).done) == (4, 4)


def test_a_dead_shard_whose_input_changed_fails_the_job_by_name(site: Site) -> None:
    spec = site.planned(4, max_tries=1)
    lease = site.lease(spec)
    assert lease is not None
    site.ledger.release(lease, "x")
    assert site.lease(spec) is None
    site.stores.put(spec.input.files[0].url, b'{"prompt": "another"}\n' * 4)
    site.control.assemble(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["input_changed"])


def test_an_output_in_another_kind_of_store_is_copied_there(any_site: Site, tmp_path: Any) -> None:
    output = f"file://{tmp_path}/elsewhere/out.jsonl"
    spec = finalizing(any_site, MIXED, output_url=output, error_url=errors_beside(output))
    any_site.control.assemble(spec.id)
    assert len(any_site.rows(output)) == 10
    assert (tmp_path / "elsewhere" / "out.errors.jsonl").exists()


def test_a_job_in_work_is_not_assembled(site: Site) -> None:
    spec = site.planned(8)
    site.work(spec, shards=1)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "in_progress"
    assert [info.url for info in site.stores.list(spec.output_url)] == []
