"""Commands while Redis is full, read-only or gone: each says so in one typed error, and leaves nothing half done."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.errors import EXIT_DONE, EXIT_UNREACHABLE
from jobs.ledger import Ledger
from jobs.recover import lost_jobs
from jobs.spec import JobSpec
from tests.jobs.commands import Command
from tests.jobs.site import Site
from tests.servers import ValkeyServer

CHANGES: dict[str, tuple[str, ...]] = {
    "submit": ("submit", "in.jsonl", "--model", "tiny", "--prompt-column", "prompt"),
    "pause": ("pause", "JOB"),
    "set": ("set", "JOB", "--priority", "3"),
    "cancel": ("cancel", "JOB"),
    "retry": ("retry", "ENDED", "--failed"),
}
LOOKS: dict[str, tuple[str, ...]] = {
    "status": ("status", "JOB"),
    "list": ("list",),
    "report": ("report", "ENDED"),
    "results": ("results", "ENDED"),
    "errors": ("errors", "ENDED"),
    "watch": ("watch", "ENDED"),
}


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"text": "c"}\n')
    return Site.of(valkey.settings(storage=f"file://{tmp_path}/store"), Ledger(valkey.client))


@pytest.fixture
def jobs(site: Site) -> dict[str, str]:
    """A job that runs, and one that has ended with a failed row."""
    ended = site.submit([{"prompt": "a"}, {"text": "b"}])
    site.control.plan(ended.id)
    site.work(ended)
    site.control.assemble(ended.id)
    return {"JOB": site.planned(8).id, "ENDED": ended.id}


@pytest.fixture
def full(valkey: ValkeyServer, jobs: dict[str, str]) -> Iterator[None]:
    valkey.client.config_set("maxmemory", 1)
    yield
    valkey.client.config_set("maxmemory", 0)


@pytest.fixture
def replica(valkey: ValkeyServer, jobs: dict[str, str]) -> Iterator[None]:
    """As a server is for a moment after a failover."""
    valkey.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    yield
    valkey.client.execute_command("REPLICAOF", "NO", "ONE")


def spoken(arguments: tuple[str, ...], jobs: dict[str, str]) -> list[str]:
    return [jobs.get(argument, argument) for argument in arguments]


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.usefixtures("full")
def test_a_full_server_refuses_a_change_by_name(verb: str, site: Site, jobs: dict[str, str], pagemill: Command) -> None:
    before = [site.ledger.view(job_id) for job_id in jobs.values()]
    done = pagemill(*spoken(CHANGES[verb], jobs), "--json")
    assert (done.code, done.error["code"]) == (EXIT_UNREACHABLE, "ledger_full")
    assert "maxmemory" in done.error["hint"]
    assert [site.ledger.view(job_id) for job_id in jobs.values()] == before
    assert list(lost_jobs(site.settings.storage_url, site.ledger, site.stores)) == []


@pytest.mark.parametrize("verb", CHANGES)
@pytest.mark.usefixtures("replica")
def test_a_read_only_server_refuses_a_change_by_name(
    verb: str, site: Site, jobs: dict[str, str], pagemill: Command
) -> None:
    done = pagemill(*spoken(CHANGES[verb], jobs), "--json")
    assert (done.code, done.error["code"]) == (EXIT_UNREACHABLE, "service_unreachable")
    assert "is a read-only replica" in done.error["message"]
    assert list(lost_jobs(site.settings.storage_url, site.ledger, site.stores)) == []


@pytest.mark.parametrize("verb", LOOKS)
@pytest.mark.parametrize("trouble", ["full", "replica"])
def test_what_only_looks_works_all_the_same(
    trouble: str, verb: str, jobs: dict[str, str], pagemill: Command, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(trouble)
    done = pagemill(*spoken(LOOKS[verb], jobs), "--json")
    assert done.code in (EXIT_DONE, 3), done.err


@pytest.mark.usefixtures("full")
def test_a_job_that_waits_for_a_full_server_says_so(jobs: dict[str, str], pagemill: Command) -> None:
    assert pagemill("status", jobs["JOB"], "--json").json["reason"].startswith("Redis is full")


def test_a_dead_worker_can_be_looked_at_on_a_replica(
    site: Site, jobs: dict[str, str], valkey: ValkeyServer, pagemill: Command, request: pytest.FixtureRequest
) -> None:
    valkey.client.sadd("pm:workers", "dead")
    request.getfixturevalue("replica")
    assert "no live worker serves the model" in pagemill("status", jobs["JOB"], "--json").json["reason"]


@pytest.mark.parametrize(("share", "told"), [(0.5, False), (0.7, True)])
def test_the_doctor_tells_of_memory_that_runs_short(
    share: float, told: bool, valkey: ValkeyServer, pagemill: Command
) -> None:
    valkey.client.config_set("maxmemory", int(valkey.client.info("memory")["used_memory"] / share))
    try:
        assert ("of its maxmemory is in use" in pagemill("doctor").out) == told
    finally:
        valkey.client.config_set("maxmemory", 0)


@pytest.mark.parametrize("verb", CHANGES | LOOKS)
def test_a_server_that_is_not_there_is_named(verb: str, jobs: dict[str, str], pagemill: Command) -> None:
    arguments = spoken((CHANGES | LOOKS)[verb], jobs)
    done = pagemill(*arguments, "--json", PAGEMILL_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert (done.code, done.error["code"]) == (EXIT_UNREACHABLE, "service_unreachable")
    assert "127.0.0.1:1" in done.error["message"]
    assert "secret" not in done.err


def test_a_job_that_runs_is_untouched_by_a_submit_that_is_refused(
    site: Site, jobs: dict[str, str], full: None, valkey: ValkeyServer, pagemill: Command
) -> None:
    assert pagemill(*CHANGES["submit"]).code == EXIT_UNREACHABLE
    valkey.client.config_set("maxmemory", 0)
    spec: JobSpec = site.ledger.spec(jobs["JOB"])
    site.work(spec)
    site.control.assemble(spec.id)
    assert site.ledger.state(spec.id) == "completed"
    assert pagemill(*CHANGES["submit"]).code == EXIT_DONE
