"""The commands that hold, stop and repeat jobs, and the options that say how a job runs beside others."""

import gzip
import json
import time
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.broker import CONTROL_QUEUE, PLAN, WORK, model_queue
from jobs.cli.terms import deadline
from jobs.errors import EXIT_DONE, EXIT_JOB_FAILED, EXIT_ROWS_FAILED, EXIT_USAGE, UsageError
from jobs.formats.jsonl import dumps
from jobs.ledger import Ledger
from tests.jobs.commands import Command
from tests.jobs.ledgers import key, leased
from tests.jobs.site import Site
from tests.servers import ValkeyServer

RECORDS = ("--model", "tiny", "--prompt-column", "prompt")


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """In the working folder, with an input of three rows, the last of them bad."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"text": "c"}\n')
    return Site.of(valkey.settings(storage=f"file://{tmp_path}/store"), Ledger(valkey.client))


def submitted(pagemill: Command, *options: str) -> str:
    """The id of a submitted job."""
    done = pagemill("submit", "in.jsonl", *RECORDS, *options)
    assert done.code == EXIT_DONE, done.err
    return done.out.strip()


def completed(pagemill: Command, site: Site) -> str:
    job = submitted(pagemill)
    site.control.plan(job)
    site.work(site.ledger.spec(job))
    site.control.assemble(job)
    return job


# --- pause and resume ---------------------------------------------------------------------------------------------


def test_a_job_is_paused_and_resumed(pagemill: Command, site: Site) -> None:
    job = submitted(pagemill)
    site.control.plan(job)
    assert pagemill("pause", job).out == "in_progress, paused\n"
    assert pagemill("pause", job, "--json").json["paused"] is True
    shown = pagemill("status", job).out
    assert "in_progress, paused" in shown
    assert f"paused: nothing is in work, and no more is begun; `pagemill resume {job}` goes on" in shown
    assert "in_progress, paused" in pagemill("list").out
    site.ledger.client.delete(*site.ledger.client.keys("pm:bk:*"))
    assert pagemill("resume", job).out == "in_progress\n"
    assert site.queued(model_queue("tiny")) == [(WORK, "('tiny',)")]
    assert pagemill("resume", job, "--json").json["paused"] is False


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_a_job_that_has_ended_is_left_alone(verb: str, pagemill: Command, site: Site) -> None:
    code = {"pause": "not_pausable", "resume": "not_resumable", "cancel": "not_cancellable"}[verb]
    job = completed(pagemill, site)
    done = pagemill(verb, job, "--json")
    assert (done.code, done.error["code"]) == (EXIT_USAGE, code)
    assert done.error["message"] == f"The job is completed: there is nothing to {verb}."
    assert pagemill(verb, "nothing", "--json").error["code"] == "no_such_job"


# --- retry --------------------------------------------------------------------------------------------------------


def test_the_failed_rows_of_a_job_run_again_in_a_job_of_their_own(pagemill: Command, site: Site) -> None:
    job = completed(pagemill, site)
    child = pagemill("retry", job, "--failed", "-o", "merged.jsonl", "--priority", "7", "--expires", "1h").out.strip()
    assert (PLAN, f"('{child}',)") in site.queued(CONTROL_QUEUE)
    parent, spec = site.ledger.spec(job), site.ledger.spec(child)
    assert spec.input == parent.input
    assert (spec.priority, spec.output_url, spec.error_url) == (
        7,
        f"file://{Path.cwd()}/merged.jsonl",
        f"file://{Path.cwd()}/merged.errors.jsonl",
    )
    shown = pagemill("status", child)
    assert f"the failed rows of {job}" in shown.out
    assert pagemill("status", child, "--json").json["parent"] == job
    site.control.plan(child)
    assert site.stores.read(spec.layout.plan) == site.stores.read(parent.layout.plan)


def test_a_retry_has_its_parent_s_terms_but_for_the_deadline(pagemill: Command, site: Site) -> None:
    options = ("--tenant", "rag", "--priority", "3", "--max-row-seconds", "9", "--dedupe", "exact", "--expires", "1h")
    job = submitted(pagemill, *options)
    site.control.plan(job)
    site.work(site.ledger.spec(job))
    site.control.assemble(job)
    child = pagemill("retry", job, "--failed", "--max-row-seconds", "99", "--json").json["id"]
    terms = site.ledger.spec(child).terms
    assert (terms.tenant, terms.priority, terms.dedupe) == ("rag", 3, "exact")
    assert (terms.max_row_seconds, terms.expires_at) == (99, None)


def test_a_retry_says_which_rows_and_of_which_job(pagemill: Command, site: Site) -> None:
    job = submitted(pagemill)
    assert pagemill("retry", job, "--json").error["message"] == "Say which rows: --failed."
    running = pagemill("retry", job, "--failed", "--json")
    assert (running.code, running.error["code"]) == (EXIT_USAGE, "not_retriable")
    assert running.error["hint"] == f"`pagemill watch {job}` waits for it."
    assert pagemill("retry", "nothing", "--failed", "--json").error["code"] == "no_such_job"


# --- rows that failed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "completed, 1 of 2 rows failed"),
        ('{"text": "a"}\n{"text": "b"}\n', "completed, all rows failed"),
        ('{"prompt": "a"}\n', "completed"),
    ],
)
def test_a_completed_job_with_failed_rows_does_not_look_like_a_success(
    rows: str, words: str, pagemill: Command, site: Site
) -> None:
    Path("in.jsonl").write_text(rows)
    job = completed(pagemill, site)
    for shown in (pagemill("status", job).out, pagemill("list").out, pagemill("watch", job).out):
        assert words in shown
        assert ("rows failed" in shown) == (words != "completed")
    code = EXIT_DONE if words == "completed" else EXIT_ROWS_FAILED
    assert pagemill("watch", job).code == pagemill("results", job, "--follow").code == code
    told = pagemill("results", job).err
    assert ("rows failed: `pagemill errors" in told) == (words != "completed")


@pytest.mark.parametrize(
    ("name", "rows"), [("in.jsonl", 25), ("in.jsonl", 19), ("in.jsonl.gz", 25), ("in.parquet", 25)]
)
def test_a_column_that_is_called_otherwise_shows_at_once(name: str, rows: int, pagemill: Command) -> None:
    records = [{"q": f"question {n}", "prompt": None} for n in range(rows)]
    lines = b"".join(dumps(record) + b"\n" for record in records)
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(records), name)
    else:
        Path(name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    done = pagemill("submit", name, *RECORDS)
    assert done.code == EXIT_DONE
    told = "The first rows are all bad: line 1: Missing required column: 'prompt'." in done.err
    assert told == (rows == 25 and not name.endswith("gz"))


def test_a_job_that_cannot_be_read_hides_no_other(pagemill: Command, site: Site) -> None:
    newer, gone, mine = submitted(pagemill), submitted(pagemill), submitted(pagemill)
    spec = json.loads(site.ledger.client.hget(key(newer, "job"), "spec"))
    site.ledger.client.hset(key(newer, "job"), "spec", json.dumps({**spec, "of_a_newer_version": 1}))
    site.ledger.client.delete(key(gone, "job"))
    done = pagemill("list", "--json")
    assert (done.code, [view["id"] for view in done.json]) == (EXIT_DONE, [mine])
    assert newer in done.err
    assert gone in done.err


# --- how a job runs beside others ---------------------------------------------------------------------------------


def test_a_job_is_submitted_on_terms_and_shows_them(pagemill: Command, site: Site) -> None:
    before = int(time.time())
    options = ("--tenant", "rag", "--priority", "-5", "--weight", "2.5", "--expires", "1d12h")
    job = submitted(pagemill, *options, "--max-row-seconds", "90", "--dedupe", "all")
    spec = site.ledger.spec(job)
    assert (spec.tenant, spec.priority, spec.weight, spec.max_row_seconds, spec.dedupe) == ("rag", -5, 2.5, 90, "all")
    assert spec.expires_at is not None
    assert before + 36 * 3600 <= spec.expires_at <= time.time() + 36 * 3600
    view = pagemill("status", job, "--json").json
    assert (view["tenant"], view["priority"], view["expires_at"]) == ("rag", -5, spec.expires_at)
    shown = pagemill("status", job).out
    assert "priority -5, tenant rag" in shown
    assert str(datetime.fromtimestamp(spec.expires_at)) in shown
    listed = pagemill("list").out.splitlines()[1].split()
    assert [listed[3], listed[4]] == ["rag", "-5"]


def test_submitting_again_under_a_key_prints_the_same_job(pagemill: Command, site: Site) -> None:
    job = submitted(pagemill, "--idempotency-key", "k")
    assert submitted(pagemill, "--idempotency-key", "k") == job
    assert submitted(pagemill, "--idempotency-key", "l") != job
    other = pagemill("submit", "in.jsonl", *RECORDS, "--idempotency-key", "k", "--max-tokens", "9", "--json")
    assert (other.code, other.error["code"]) == (EXIT_USAGE, "idempotency_conflict")
    assert job in other.error["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--priority", "1001"), "--priority: "),
        (("--weight", "0"), "--weight: "),
        (("--tenant", "a b"), "--tenant: "),
        (("--max-row-seconds", "0"), "--max-row-seconds: "),
        (("--expires", "soon"), "--expires: 'soon' is neither a duration nor a time."),
        (("--expires", "2001-01-01"), "--expires: 2001-01-01 is not in the future."),
        (("--dedupe", "maybe"), "'maybe' is not one of"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_terms_out_of_range_are_refused_by_name(options: tuple[str, ...], words: str, pagemill: Command) -> None:
    done = pagemill("submit", "in.jsonl", *RECORDS, *options, "--json")
    assert done.code == EXIT_USAGE
    assert words in json.loads(done.err)["error"]["message"]


def test_a_job_that_expired_shows_what_it_has(pagemill: Command, site: Site) -> None:
    job = submitted(pagemill, "--expires", "1h")
    site.control.plan(job)
    leased(site.ledger, site.ledger.spec(job))
    site.ledger.client.hset(f"pm:{{{job}}}:job", "expires_at", 1)
    assert site.ledger.expire_job(job) == "ok"
    site.control.assemble(job)
    assert pagemill("watch", job).code == EXIT_JOB_FAILED
    assert pagemill("results", job).code == EXIT_DONE
    assert [json.loads(line)["error"]["code"] for line in pagemill("errors", job).out.splitlines()] == [
        "batch_expired"
    ] * 3


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("2h", 7200), ("1d", 86400), ("1d2h3m4s", 93784)]
)
def test_a_duration_counts_from_now(text: str, seconds: int) -> None:
    assert deadline(text, 1000.5) == 1000 + seconds


def test_a_time_is_local_or_in_its_zone() -> None:
    assert deadline("2030-01-31T06:00Z", 0) == deadline("2030-01-31T07:00+01:00", 0) == 1896069600
    assert deadline("2030-01-31T06:00", 0) == int(datetime(2030, 1, 31, 6).timestamp())


@pytest.mark.parametrize("text", ["", "0s", "5", "-5m", "5m2h", "now", "1e9"])
def test_what_is_no_deadline_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--expires"):
        deadline(text, time.time())
