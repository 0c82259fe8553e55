"""Redis has lost everything: storage is enough to go on, and what was finished is not done again."""

import json
from typing import Any

import pytest

from jobs.attempts import left_in_storage
from jobs.broker import PLAN
from jobs.errors import ObjectNotFound
from jobs.layout import attempt_object
from jobs.ledger import Lease
from jobs.output import Output
from jobs.planner import load_plan
from jobs.records import SegmentRecord, Usage
from jobs.recover import Unusable, lost_jobs, recover
from jobs.results import Choice, Completion
from jobs.spec import JobSpec
from tests.jobs.ledgers import key
from tests.jobs.site import Site, prompts


def lose_redis(site: Site) -> None:
    site.ledger.client.flushall()


def recover_all(site: Site) -> list[str]:
    """The ids of the jobs that were entered."""
    found = list(lost_jobs(site.settings.storage_url, site.ledger, site.stores))
    specs = [one for one in found if isinstance(one, JobSpec)]
    assert len(specs) == len(found)
    for spec in specs:
        recover(spec, site.ledger, site.stores, site.tokens, site.control)
    return [spec.id for spec in specs]


def leased(site: Site, spec: JobSpec) -> Lease:
    lease = site.lease(spec)
    assert lease is not None
    return lease


def shards_run(site: Site, spec: JobSpec) -> set[int]:
    """The shards that the present ledger has handed out."""
    return {int(shard) for shard in site.ledger.client.hgetall(key(spec.id, "tries"))}


def finish(site: Site, spec: JobSpec) -> bytes:
    site.work(spec)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"
    return site.stores.read(spec.output_url)


def snapshot(client: Any) -> dict[str, tuple[str, Any]]:
    """All keys of the ledger. Not by DUMP: the client decodes what it reads."""
    read = {
        "hash": client.hgetall,
        "string": client.get,
        "set": client.smembers,
        "zset": lambda name: dict(client.zrange(name, 0, -1, withscores=True)),
    }
    kinds = {name: client.type(name) for name in client.keys("pm:*") if not name.startswith("pm:bk:")}
    return {name: (kind, read[kind](name)) for name, kind in kinds.items()}


def write(client: Any, name: str, kind: str, value: Any) -> None:
    match kind:
        case "hash":
            client.hset(name, mapping=value)
        case "zset":
            client.zadd(name, value)
        case "set":
            client.sadd(name, *value)
        case _:
            client.set(name, value)


MIXED = [{"prompt": f"question {n}"} if n % 5 else {"text": n} for n in range(18)]


def undisturbed(site: Site, spec: JobSpec) -> bytes:
    """The output of the same job with nothing in its way."""
    again = spec.model_copy(update={"id": f"{spec.id}-calm", "output_url": f"{spec.output_url}-calm"})
    site.stores.put_if_absent(again.layout.spec, again.model_dump_json().encode())
    site.ledger.create(again)
    site.control.plan(again.id)
    return finish(site, again)


@pytest.mark.parametrize("form", [Output(), Output(compression="gzip"), Output(format="parquet")], ids=lambda f: f.name)
def test_a_job_goes_on_where_it_was_and_gives_the_same_bytes(any_site: Site, form: Output) -> None:
    """Shards 0 and 2 are committed, 1 and 3 are at work when everything in Redis is gone."""
    site = any_site
    spec = site.submit(MIXED, output=form)
    site.control.plan(spec.id)
    leases = [leased(site, spec) for _ in range(4)]
    for lease in (leases[2], leases[0]):
        assert site.ledger.commit(lease, site.segment(lease)) == "ok"
    before = site.ledger.view(spec.id)

    lose_redis(site)
    assert recover_all(site) == [spec.id]
    after = site.ledger.view(spec.id)
    assert after.state == "in_progress"
    assert (after.rows, after.done, after.failed, after.shards, after.settled, after.usage) == (
        *(before.rows, before.done, before.failed, before.shards, before.settled, before.usage),
    )
    assert site.ledger.client.zrange(key(spec.id, "ready"), 0, -1) == ["1", "3", "4"]
    output = finish(site, spec)
    assert shards_run(site, spec) == {1, 3, 4}
    assert output == undisturbed(site, spec)
    assert len(site.rows(spec.error_url)) == 4


def test_a_lease_of_the_lost_ledger_commits_nothing(site: Site) -> None:
    spec = site.planned(10)
    old = leased(site, spec)
    late = site.segment(old)
    lose_redis(site)
    assert site.ledger.commit(old, late) == "stop"
    assert site.ledger.beat([(old, 1)], 60) == ["stop"]
    site.stores.delete([spec.layout.record(old.shard.index, old.fence, old.attempt)])
    recover_all(site)
    assert site.ledger.commit(old, late) == "lost"
    assert site.ledger.beat([(old, 1)], 60) == ["lost"]
    heir = leased(site, spec)
    assert heir.shard == old.shard
    assert heir.fence > old.fence
    assert site.ledger.commit(old, late) == "lost"
    assert site.ledger.commit(heir, site.segment(heir)) == "ok"
    assert site.ledger.commit(old, late) == "superseded"


def test_a_segment_that_was_put_and_not_committed_is_not_computed_again(site: Site) -> None:
    """Its worker finds the shard settled by its own attempt: the commit that it repeats is the one that stands."""
    spec = site.planned(8)
    lease = leased(site, spec)
    record = site.segment(lease)
    lose_redis(site)
    recover_all(site)
    assert site.ledger.commit(lease, record) == "ok"
    finish(site, spec)
    assert shards_run(site, spec) == {1}


@pytest.mark.parametrize("part", ["", ".errors"])
def test_a_segment_of_which_a_part_is_missing_or_another_is_no_segment(any_site: Site, part: str) -> None:
    site = any_site
    spec = site.submit(MIXED)
    site.control.plan(spec.id)
    gone, changed, whole = leased(site, spec), leased(site, spec), leased(site, spec)
    for lease in (gone, changed, whole):
        site.segment(lease)
    site.stores.delete([spec.layout.segment(0, gone.fence, gone.attempt, part)])
    site.stores.put(spec.layout.segment(1, changed.fence, changed.attempt, part), b"{}\n")
    lose_redis(site)
    recover_all(site)
    assert set(site.ledger.records(spec.id)) == {2}


def test_a_segment_without_its_record_is_no_segment(site: Site) -> None:
    """The attempt may have ended between its two parts."""
    spec = site.planned(8)
    lease = leased(site, spec)
    site.segment(lease)
    site.stores.delete([spec.layout.record(0, lease.fence, lease.attempt)])
    lose_redis(site)
    recover_all(site)
    assert site.ledger.records(spec.id) == {}
    assert leased(site, spec).fence > lease.fence


@pytest.mark.parametrize("change", [{"ok": 3}, {"fence": 9}, {"attempt": "another"}])
def test_a_record_that_does_not_fit_its_shard_and_its_name_is_no_record(site: Site, change: dict[str, object]) -> None:
    spec = site.planned(8)
    lease = leased(site, spec)
    record = site.segment(lease)
    unlike = record.model_copy(update=change)
    for part, info in (("", record.output), (".errors", record.errors)):
        if info is not None:
            data = site.stores.read(spec.layout.segment(0, lease.fence, lease.attempt, part))
            again = site.stores.put(spec.layout.segment(0, unlike.fence, unlike.attempt, part), data)
            parts = {"output" if part == "" else "errors": info.model_copy(update={"etag": again.etag})}
            unlike = unlike.model_copy(update=parts)
    site.stores.put(spec.layout.record(0, lease.fence, lease.attempt), unlike.model_dump_json().encode())
    lose_redis(site)
    recover_all(site)
    assert site.ledger.records(spec.id) == {}


def test_of_several_whole_segments_the_highest_fence_is_taken_by_all(site: Site) -> None:
    spec = site.planned(4)
    first = leased(site, spec)
    site.segment(first)
    site.ledger.give_back(first)
    second = leased(site, spec)
    site.segment(second)
    plan = load_plan(site.stores.read(spec.layout.plan))
    left = left_in_storage(site.stores, spec.layout, plan)
    assert left.segments[0].attempt == second.attempt
    assert left.fence > second.fence


def test_fences_grow_over_any_number_of_losses(site: Site) -> None:
    spec = site.planned(12)
    fences = []
    for _ in range(3):
        lease = leased(site, spec)
        site.segment(lease)
        fences.append(lease.fence)
        lose_redis(site)
        recover_all(site)
    assert fences == sorted(set(fences))
    assert site.ledger.state(spec.id) == "finalizing"


def test_a_job_of_which_all_shards_were_settled_is_assembled(any_site: Site) -> None:
    spec = any_site.planned(10)
    any_site.work(spec)
    lose_redis(any_site)
    recover_all(any_site)
    assert any_site.ledger.state(spec.id) == "finalizing"
    any_site.control.assemble(spec.id)
    assert [row["response"] for row in any_site.rows(spec.output_url)] == [f"answer {n}" for n in range(10)]
    assert shards_run(any_site, spec) == set()


def test_a_job_that_had_ended_has_ended(any_site: Site) -> None:
    spec = any_site.submit(MIXED)
    any_site.control.plan(spec.id)
    finish(any_site, spec)
    before = any_site.ledger.view(spec.id)
    lose_redis(any_site)
    recover_all(any_site)
    after = any_site.ledger.view(spec.id)
    assert before.ended_at is not None
    assert after == before
    assert any_site.ledger.live_jobs() == []


def test_a_cancelled_job_stays_cancelled_with_its_file_of_the_rest(site: Site) -> None:
    spec = site.planned(8)
    site.work(spec, shards=1)
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    lose_redis(site)
    recover_all(site)
    view = site.ledger.view(spec.id)
    assert (view.state, view.done, view.remaining_url) == ("cancelled", 4, spec.layout.remaining)


def test_a_ledger_that_was_rolled_back_to_before_the_end_does_not_touch_the_result(
    any_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last shard runs again and gives another answer; the files stay what the manifest says of them."""
    site, redis = any_site, any_site.ledger.client
    spec = site.planned(8)
    site.work(spec, shards=1)
    before = snapshot(redis)
    output = finish(site, spec)
    truth = site.stores.read(spec.layout.manifest)
    lose_redis(site)
    for name, (kind, value) in before.items():
        write(redis, name, kind, value)
    assert site.ledger.view(spec.id).settled == 1
    other = Completion((Choice("something else", "stop"),), Usage())
    monkeypatch.setattr("tests.jobs.site.answer", lambda planned: other)
    assert finish(site, spec) == output
    assert site.stores.read(spec.layout.manifest) == truth
    assert site.ledger.view(spec.id).usage == Usage(prompt_tokens=24, completion_tokens=16)


def test_a_job_that_was_not_planned_is_planned(site: Site) -> None:
    spec = site.submit(prompts(5))
    lose_redis(site)
    recover_all(site)
    assert site.ledger.state(spec.id) == "validating"
    assert (PLAN, f"('{spec.id}',)") in site.queued("pm.control")
    site.control.plan(spec.id)
    finish(site, spec)


def test_it_may_be_repeated_and_leaves_alone_what_the_ledger_knows(site: Site) -> None:
    spec = site.planned(8)
    site.work(spec, shards=1)
    assert recover_all(site) == []
    lose_redis(site)
    assert recover_all(site) == [spec.id]
    before = site.ledger.view(spec.id)
    assert recover_all(site) == []
    recover(spec, site.ledger, site.stores, site.tokens, site.control)
    assert site.ledger.view(spec.id) == before


@pytest.mark.parametrize("step", ["create", "add_shards", "adopt", "open"])
def test_a_recovery_that_crashed_is_finished_by_the_next_plan(
    site: Site, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = site.planned(12)
    site.work(spec, shards=2)
    lose_redis(site)
    act = getattr(site.ledger, step)

    def crash_after(*args: object, **fields: object) -> None:
        act(*args, **fields)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(site.ledger, step, crash_after)
        with pytest.raises(KeyboardInterrupt):
            recover_all(site)
    site.control.plan(spec.id)
    assert site.ledger.view(spec.id).settled == 2
    finish(site, spec)
    assert shards_run(site, spec) == {2}


def test_a_folder_without_a_spec_is_no_job_and_a_spec_from_elsewhere_is_left_out(site: Site) -> None:
    site.stores.put(f"{site.settings.storage_url}/jobs/half/input.jsonl", b"{}\n")
    stranger = site.spec(prompts(1), storage_url="file:///elsewhere")
    site.stores.put(f"{site.settings.storage_url}/jobs/{stranger.id}/job.json", stranger.model_dump_json().encode())
    site.stores.put(f"{site.settings.storage_url}/jobs/broken/job.json", b'{"id": 7}')
    found = list(lost_jobs(site.settings.storage_url, site.ledger, site.stores))
    assert all(isinstance(one, Unusable) for one in found)
    whys = {one.job_id: one.why for one in found if isinstance(one, Unusable)}
    assert set(whys) == {"broken", stranger.id}
    assert "file:///elsewhere" in whys[stranger.id]


def test_the_name_of_an_object_tells_its_attempt(site: Site) -> None:
    layout = site.spec(prompts(1)).layout
    assert attempt_object(layout.segment(3, 7, "ab12", ".errors")) == (3, 7, "ab12", False)
    assert attempt_object(layout.record(1_000_003, 7, "ab12")) == (1_000_003, 7, "ab12", True)
    assert attempt_object(layout.manifest) is None


def test_the_record_in_storage_is_the_one_that_is_committed(site: Site) -> None:
    spec = site.planned(4)
    lease = leased(site, spec)
    record = site.segment(lease)
    stored = site.stores.read(spec.layout.record(0, lease.fence, lease.attempt))
    assert SegmentRecord.model_validate(json.loads(stored)) == record
    with pytest.raises(ObjectNotFound):
        site.stores.head(spec.layout.record(0, lease.fence, "another"))
