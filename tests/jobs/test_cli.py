"""The command line without workers: what it shows, and that bad input gets words, a code and an exit code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from jobs.broker import ASSEMBLE, CONTROL_QUEUE
from jobs.errors import EXIT_DONE, EXIT_JOB_FAILED, EXIT_ROWS_FAILED, EXIT_UNREACHABLE, EXIT_USAGE
from jobs.ledger import Ledger
from tests.jobs.commands import Command
from tests.jobs.ledgers import leased, worker
from tests.jobs.site import Site
from tests.servers import BUCKET, S3Server, ValkeyServer

RECORDS = ("--model", "tiny", "--prompt-column", "prompt")
DEAD_S3 = S3Server("http://127.0.0.1:1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an input of three rows in it, the last of them bad."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"text": "c"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.fixture
def site(valkey: ValkeyServer, folder: Path) -> Site:
    return Site.of(valkey.settings(storage=f"file://{folder}/store"), Ledger(valkey.client))


@pytest.fixture
def job(pagemill: Command) -> str:
    """The id of a submitted job."""
    return pagemill("submit", "in.jsonl", *RECORDS, "--max-tokens", "8").out.strip()


# --- bad input ----------------------------------------------------------------------------------------------------

BAD_COMMANDS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a missing file": (("submit", "missing.jsonl", *RECORDS), "input_not_found", "no file missing.jsonl"),
    "an empty file": (("submit", "empty.jsonl", *RECORDS), "empty_file", "is empty"),
    "a folder of nothing": (("submit", "sub", *RECORDS), "input_not_found", "The folder sub has no files"),
    "a glob that matches nothing": (("submit", "*.csv", *RECORDS), "input_not_found", "No file matches *.csv"),
    "one file twice": (("submit", "in.jsonl", "in.jsonl", *RECORDS), "usage", "is named twice"),
    "files beside standard input": (("submit", "-", "in.jsonl", *RECORDS), "usage", "cannot be one of several"),
    "a limit of no rows": (("submit", "in.jsonl", *RECORDS, "--limit", "0"), "usage", "--limit: 0 rows"),
    "a sample of a limit": (
        ("submit", "in.jsonl", *RECORDS, "--limit", "5", "--sample", "2"),
        "usage",
        "--limit and --sample exclude each other",
    ),
    "a seed of no sample": (("submit", "in.jsonl", *RECORDS, "--sample-seed", "1"), "usage", "--sample-seed goes with"),
    "a format that is none": (
        ("submit", "in.jsonl", *RECORDS, "--input-format", "xls"),
        "usage",
        "'xls' is not one of",
    ),
    "lines of no length": (("submit", "in.jsonl", *RECORDS, "--max-line-bytes", "5"), "usage", "--max-line-bytes"),
    "columns of lines": (("submit", "in.jsonl", *RECORDS, "--select", "a"), "usage", "are for Parquet"),
    "a condition on lines": (("submit", "in.jsonl", *RECORDS, "--where", "a = 1"), "usage", "are for Parquet"),
    "a template that is none": (
        ("submit", "in.jsonl", "--model", "tiny", "--template", "a\n{{ b"),
        "usage",
        "--template: line 2 of the template",
    ),
    "a template in no file": (
        ("submit", "in.jsonl", "--model", "tiny", "--template", "@missing.txt"),
        "usage",
        "missing.txt cannot be read",
    ),
    "a column and a template": (
        ("submit", "in.jsonl", *RECORDS, "--template", "x"),
        "usage",
        "--prompt-column and --template exclude each other",
    ),
    "an unknown scheme": (("submit", "gs://b/k", *RECORDS), "usage", "no storage for gs://"),
    "an output in an unknown scheme": (("submit", "in.jsonl", *RECORDS, "-o", "gs://b/k"), "usage", "gs://"),
    "an output of another form": (
        ("submit", "in.jsonl", *RECORDS, "-o", "out.jsonl", "--output-format", "parquet"),
        "output_format",
        "--output-format parquet contradicts the output's name",
    ),
    "an output of no form": (("submit", "in.jsonl", *RECORDS, "-o", "out.csv"), "output_format", "ends with .csv"),
    "an output format that is none": (("submit", "in.jsonl", *RECORDS, "--output-format", "csv"), "usage", "'csv'"),
    "an output folder that is full": (("submit", "in.jsonl", *RECORDS, "-o", "./"), "output_not_empty", "not empty"),
    "an output that is the input": (("submit", "in.jsonl", *RECORDS, "-o", "in.jsonl"), "usage", "overwrite"),
    "a temperature out of range": (
        ("submit", "in.jsonl", *RECORDS, "--temperature", "5"),
        "usage",
        "--temperature: Input should be less than or equal to 2",
    ),
    "a count that is none": (("submit", "in.jsonl", *RECORDS, "--max-tokens", "many"), "usage", "--max-tokens"),
    "no tokens": (("submit", "in.jsonl", *RECORDS, "--max-tokens", "0"), "usage", "--max-tokens"),
    "an empty stop string": (("submit", "in.jsonl", *RECORDS, "--stop", ""), "usage", "--stop"),
    "two columns": (("submit", "in.jsonl", *RECORDS, "--messages-column", "m"), "usage", "exclude each other"),
    "a system message beside messages": (
        ("submit", "in.jsonl", "--model", "tiny", "--messages-column", "m", "--system", "x"),
        "usage",
        "--system goes with --prompt-column",
    ),
    "a system message for OpenAI lines": (
        ("submit", "in.jsonl", "--model", "tiny", "--system", "s"),
        "usage",
        "--system goes with",
    ),
    "a policy that is none": (
        ("submit", "in.jsonl", *RECORDS, "--on-bad-row", "cry"),
        "usage",
        "'cry' is not one of 'fail', 'skip'",
    ),
    "no model": (("submit", "in.jsonl"), "usage", "--model"),
    "no such option": (("submit", "in.jsonl", *RECORDS, "--nonsense"), "usage", "--nonsense"),
    "no input": (("submit", *RECORDS), "usage", "INPUT"),
    "a limit of nothing": (("list", "--limit", "0"), "usage", "--limit"),
    "an unknown job's status": (("status", "nothing"), "no_such_job", "no job 'nothing'"),
    "an unknown job to watch": (("watch", "nothing"), "no_such_job", "no job 'nothing'"),
    "an unknown job to cancel": (("cancel", "nothing"), "no_such_job", "no job 'nothing'"),
    "an unknown job's results": (("results", "nothing"), "no_such_job", "no job 'nothing'"),
    "an unknown job's errors": (("errors", "nothing"), "no_such_job", "no job 'nothing'"),
    "a run of a missing file": (
        ("run", "missing.jsonl", "-o", "out.jsonl", *RECORDS),
        "input_not_found",
        "no file missing.jsonl",
    ),
    "a run without an output": (("run", "in.jsonl", *RECORDS), "usage", "--output"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), BAD_COMMANDS.values(), ids=BAD_COMMANDS)
def test_bad_input_is_a_usage_error(
    pagemill: Command, folder: Path, arguments: tuple[str, ...], code: str, words: str
) -> None:
    before = sorted(folder.iterdir())
    done = pagemill(*arguments)
    assert (done.code, done.out) == (EXIT_USAGE, "")
    assert words.split()[0] in done.err
    as_json = pagemill(*arguments, "--json")
    assert as_json.code == EXIT_USAGE
    assert as_json.error["code"] == code
    assert words in as_json.error["message"]
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("worker",), "--model NAME, or --control"),
        (("worker", "--control", "--model", "tiny"), "--model and --control exclude each other"),
    ],
)
def test_a_worker_is_for_a_model_or_for_control(pagemill: Command, arguments: tuple[str, ...], said: str) -> None:
    done = pagemill(*arguments)
    assert done.code == EXIT_USAGE
    assert said in done.err


BAD_SETTINGS: dict[str, tuple[dict[str, str], int, str, str]] = {
    "Redis that is not there": (
        {"PAGEMILL_REDIS_URL": "redis://me:secret@127.0.0.1:1/0"},
        EXIT_UNREACHABLE,
        "service_unreachable",
        "redis://me:***@127.0.0.1:1/0",
    ),
    "a socket that is not there": (
        {"PAGEMILL_REDIS_URL": "unix:///nowhere/valkey.sock"},
        EXIT_UNREACHABLE,
        "service_unreachable",
        "unix:///nowhere/valkey.sock",
    ),
    "no Redis URL": ({"PAGEMILL_REDIS_URL": "nonsense"}, EXIT_USAGE, "usage", "'nonsense' is no Redis URL"),
    "a port that is none": ({"PAGEMILL_REDIS_URL": "redis://:pw@h:x/0"}, EXIT_USAGE, "usage", "is no Redis URL"),
    "a ttl that is none": ({"PAGEMILL_LEASE_TTL": "soon"}, EXIT_USAGE, "invalid_setting", "lease_ttl"),
    "a shard of no rows": ({"PAGEMILL_MAX_SHARD_ROWS": "0"}, EXIT_USAGE, "invalid_setting", "max_shard_rows"),
}


@pytest.mark.parametrize("command", [("list",), ("submit", "in.jsonl", *RECORDS)], ids=lambda command: command[0])
@pytest.mark.parametrize(("environment", "code", "name", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_a_wrong_setting_is_named_and_its_password_is_not(
    pagemill: Command, command: tuple[str, ...], environment: dict[str, str], code: int, name: str, words: str
) -> None:
    done = pagemill(*command, **environment)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    as_json = pagemill(*command, "--json", **environment)
    assert as_json.code == code
    assert as_json.error["code"] == name
    assert words in as_json.error["message"]
    for text in (done.err, as_json.err):
        assert "secret" not in text
        assert ":pw@" not in text


def test_a_cluster_is_refused_by_name(pagemill: Command, tmp_path: Path) -> None:
    cluster = ValkeyServer(tmp_path / "sub", "--cluster-enabled", "yes")
    cluster.start()
    try:
        done = pagemill("list", PAGEMILL_REDIS_URL=cluster.url)
    finally:
        cluster.kill()
    assert done.code == EXIT_USAGE
    assert "Redis Cluster" in done.err


def test_a_store_that_is_not_there_is_named(pagemill: Command) -> None:
    for arguments, environment in (
        (("submit", f"s3://{BUCKET}/in.jsonl", *RECORDS), {}),
        (("submit", "in.jsonl", *RECORDS), {"PAGEMILL_STORAGE": f"s3://{BUCKET}/x"}),
    ):
        done = pagemill(*arguments, "--json", **DEAD_S3.environment(), **environment)
        assert done.code == EXIT_UNREACHABLE
        assert done.error["code"] == "service_unreachable"
        assert "http://127.0.0.1:1 does not answer" in done.error["message"]
        assert "PAGEMILL_S3_ENDPOINT_URL" in done.error["hint"]


def test_a_bucket_that_refuses_is_named(pagemill: Command, rclone_s3: S3Server) -> None:
    stranger = S3Server(rclone_s3.endpoint, access_key="WRONGKEY01").environment()
    done = pagemill("submit", "in.jsonl", *RECORDS, "--json", PAGEMILL_STORAGE=f"s3://{BUCKET}/x", **stranger)
    assert done.code == EXIT_USAGE
    assert done.error["code"] == "storage"
    assert rclone_s3.endpoint in done.error["message"]
    assert "PAGEMILL_S3_ACCESS_KEY_ID" in done.error["hint"]
    assert "secretkey" not in done.err


def test_no_traceback_reaches_a_user_of_the_real_command(folder: Path, valkey: ValkeyServer) -> None:
    command = [sys.executable, "-m", "jobs.cli", "submit", "missing.jsonl", *RECORDS]
    done = subprocess.run(command, env=valkey.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr == "error: There is no file missing.jsonl.\n"


def test_a_server_that_dies_during_a_command_is_named(pagemill: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any) -> None:
        raise RedisConnectionError("Connection closed by server.")

    monkeypatch.setattr(Ledger, "job_ids", gone)
    done = pagemill("list")
    assert done.code == EXIT_UNREACHABLE
    assert "valkey.sock" in done.err
    assert "Connection closed by server." in done.err


# --- jobs without workers -----------------------------------------------------------------------------------------


def test_a_job_without_anybody_to_do_it_says_what_it_waits_for(pagemill: Command, site: Site, job: str) -> None:
    done = pagemill("status", job)
    assert done.code == EXIT_DONE
    assert "start `pagemill worker --control`" in done.out
    site.control.plan(job)
    assert "no live worker serves the model 'tiny'" in pagemill("status", job, "--json").json["reason"]
    site.ledger.announce(worker("tiny"), 60)
    site.control.sweep()
    assert pagemill("status", job, "--json").json["reason"] == "waiting for a free slot of 1 worker(s)"
    lease = leased(site.ledger, site.ledger.spec(job))
    site.ledger.release(lease, "the bucket [x] refuses")
    assert "shard 0 is tried again: the bucket [x] refuses" in pagemill("status", job).out


def test_a_submit_says_that_no_worker_serves_the_model(pagemill: Command, site: Site) -> None:
    assert "No live worker serves 'tiny'" in pagemill("submit", "in.jsonl", *RECORDS).err
    site.ledger.announce(worker("tiny"), 60)
    assert pagemill("submit", "in.jsonl", *RECORDS).err == ""


def test_a_submitted_job_has_its_options(pagemill: Command, site: Site) -> None:
    done = pagemill(
        *("submit", "in.jsonl", *RECORDS, "--json", "-o", "out.jsonl", "--on-bad-row", "fail", "--system", "Be brief."),
        *("--max-tokens", "8", "--temperature", "0", "--top-p", "0.5", "--seed", "7", "--stop", "a", "--stop", "b"),
        *("--model-alias", "gpt"),
    )
    spec = site.ledger.spec(done.json["id"])
    assert (spec.model, spec.model_aliases, spec.on_bad_row) == ("tiny", ("gpt",), "fail")
    assert (spec.rows.kind, spec.output_url) == ("record", f"file://{Path.cwd()}/out.jsonl")
    sampling = spec.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (8, 0.0, 0.5, 7)
    assert sampling.stop == ("a", "b")


def test_jobs_are_listed_newest_first(pagemill: Command, site: Site, job: str) -> None:
    second = pagemill("submit", "in.jsonl", *RECORDS).out.strip()
    assert [view["id"] for view in pagemill("list", "--json").json] == [second, job]
    assert [view["id"] for view in pagemill("list", "--json", "-n", "1").json] == [second]
    shown = pagemill("list").out
    assert shown.index(second) < shown.index(job)
    assert "validating" in shown


def test_a_job_is_followed_to_its_end_and_read(pagemill: Command, site: Site, job: str, folder: Path) -> None:
    done = pagemill("results", job, "--json")
    assert done.code == EXIT_USAGE
    assert "is validating" in done.error["message"]
    site.control.plan(job)
    site.work(site.ledger.spec(job))
    site.control.assemble(job)

    watched = pagemill("watch", job, "--json")
    assert watched.code == EXIT_ROWS_FAILED
    assert (watched.json["state"], watched.json["done"], watched.json["failed"]) == ("completed", 2, 1)
    shown = pagemill("status", job)
    assert "2 done, 1 failed" in shown.out
    assert "line 3, byte 32" in shown.err

    rows = [json.loads(line) for line in pagemill("results", job).out.splitlines()]
    assert [row["response"] for row in rows] == ["answer 0", "answer 1", None]
    assert pagemill("results", job, "-o", "sub/../copy.jsonl").code == EXIT_DONE
    assert (folder / "copy.jsonl").read_text() == pagemill("results", job).out
    assert pagemill("results", job, "--json").json["size"] == (folder / "copy.jsonl").stat().st_size

    (failed,) = [json.loads(line) for line in pagemill("errors", job).out.splitlines()]
    assert (failed["line"], failed["byte"], failed["error"]["code"]) == (3, 32, "missing_required_parameter")
    cancelled = pagemill("cancel", job, "--json")
    assert cancelled.error["code"] == "not_cancellable"


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl.zst", "parquet/", "jsonl.gz/"])
def test_results_of_every_form_are_printed_as_lines_and_copied_as_they_are(
    name: str, pagemill: Command, site: Site, folder: Path
) -> None:
    form = ("--output-format", name.rstrip("/")) if name.endswith("/") else ()
    job = pagemill("submit", "in.jsonl", *RECORDS, "-o", name, *form).out.strip()
    site.control.plan(job)
    site.work(site.ledger.spec(job))
    site.control.assemble(job)
    printed = pagemill("results", job).out
    assert [json.loads(line)["response"] for line in printed.splitlines()] == ["answer 0", "answer 1", None]
    assert pagemill("results", job, "-o", "lines.jsonl").code == EXIT_DONE
    assert (folder / "lines.jsonl").read_text() == printed
    copy = f"copy.{name}"
    assert pagemill("results", job, "-o", copy).code == EXIT_DONE
    copied = {path.name: path.read_bytes() for path in (folder / copy).glob("*")} or (folder / copy).read_bytes()
    assert copied == (
        {path.name: path.read_bytes() for path in (folder / name).glob("*")} or (folder / name).read_bytes()
    )
    other = pagemill("results", job, "-o", "other.jsonl.gz" if "gz" not in name else "other.parquet", "--json")
    assert other.error["code"] == "output_format"
    sizes = [path.stat().st_size for path in [folder / name, *(folder / name).glob("part-*")] if path.is_file()]
    assert pagemill("results", job, "--json").json == {"url": f"file://{folder}/{name}", "size": sum(sizes)}
    assert json.loads(pagemill("errors", job).out)["line"] == 3


def test_a_job_that_failed_lists_its_bad_rows(pagemill: Command, site: Site) -> None:
    job = pagemill("submit", "in.jsonl", *RECORDS, "--on-bad-row", "fail").out.strip()
    site.control.plan(job)
    assert pagemill("watch", job).code == EXIT_JOB_FAILED
    (error,) = [json.loads(line) for line in pagemill("errors", job).out.splitlines()]
    assert (error["line"], error["byte"]) == (3, 32)
    assert "is failed" in pagemill("results", job).err


def test_a_job_that_failed_as_a_whole_says_why(pagemill: Command, site: Site, job: str, folder: Path) -> None:
    (folder / "in.jsonl").write_text('{"prompt": "another"}\n')
    site.control.plan(job)
    assert "has changed since the job was submitted" in pagemill("status", job).err
    assert json.loads(pagemill("errors", job).out)["code"] == "input_changed"
    assert pagemill("errors", job, "--json").json["errors"][0]["code"] == "input_changed"


def test_a_job_is_cancelled_and_its_rest_is_left(pagemill: Command, site: Site, job: str, folder: Path) -> None:
    assert pagemill("cancel", job).out == "cancelling\n"
    assert (ASSEMBLE, f"('{job}',)") in site.queued(CONTROL_QUEUE)
    assert pagemill("cancel", job, "--json").json["state"] == "cancelling"
    site.control.assemble(job)
    view = pagemill("status", job, "--json").json
    assert view["state"] == "cancelled"
    assert site.stores.read(view["remaining_url"]) == (folder / "in.jsonl").read_bytes()
    again = pagemill("submit", view["remaining_url"], *RECORDS)
    assert again.code == EXIT_DONE
    assert pagemill("watch", job).code == EXIT_JOB_FAILED


def test_words_in_brackets_are_shown_as_they_are(pagemill: Command) -> None:
    done = pagemill("submit", "[bold]x[/].jsonl", *RECORDS)
    assert "No file matches [bold]x[/].jsonl." in done.err


def test_the_doctor_names_what_is_wrong(pagemill: Command, site: Site) -> None:
    found = pagemill("doctor", "--json").json
    assert {name: check["ok"] for name, check in found.items()} == {
        "redis": True,
        "storage": True,
        "lost jobs": True,
        "workers": False,
        "engine": True,
        "embedded valkey": True,
    }
    site.ledger.announce(worker("tiny", slots=3, busy=1), 60)
    assert "tiny on h (3 slots, 1 shards in work)" in pagemill("doctor").out
    sick = pagemill("doctor", "--json", PAGEMILL_REDIS_URL="redis://:pw@127.0.0.1:1/0", PAGEMILL_STORAGE="gs://b")
    assert sick.code == EXIT_UNREACHABLE
    assert "redis://:***@127.0.0.1:1/0 does not answer" in sick.json["redis"]["detail"]
    assert "no storage for gs://" in sick.json["storage"]["detail"]


def test_a_job_that_only_storage_knows_is_recovered(pagemill: Command, site: Site, job: str) -> None:
    assert pagemill("recover", "--dry-run").out == "No job is lost.\n"
    site.control.plan(job)
    site.work(site.ledger.spec(job))
    site.ledger.client.flushall()
    lost = pagemill("status", job)
    assert lost.code == EXIT_USAGE
    assert "`pagemill recover`" in lost.err
    assert "`pagemill list`" in pagemill("status", "another").err
    check = pagemill("doctor", "--json").json["lost jobs"]
    assert (check["ok"], job in check["detail"]) == (False, True)
    assert pagemill("recover", "--dry-run", "--json").json == {"lost": [job], "recovered": [], "skipped": {}}
    (view,) = pagemill("recover", "--json").json["recovered"]
    assert (view["id"], view["state"], view["done"], view["failed"]) == (job, "finalizing", 2, 1)
    assert pagemill("recover").out.startswith("No job is lost")
    site.control.assemble(job)
    assert pagemill("status", job, "--json").json["state"] == "completed"
    site.ledger.client.flushall()
    assert "completed" in pagemill("recover").out


def test_the_doctor_warns_of_a_server_that_may_evict_or_forget(pagemill: Command, valkey: ValkeyServer) -> None:
    valkey.client.config_set("maxmemory-policy", "allkeys-lru")
    valkey.client.config_set("appendonly", "no")
    try:
        assert "may evict the ledger" in pagemill("doctor", "--json").json["redis"]["detail"]
        valkey.client.config_set("maxmemory-policy", "noeviction")
        assert "append-only file is off" in pagemill("doctor", "--json").json["redis"]["detail"]
    finally:
        valkey.client.config_set("maxmemory-policy", "noeviction")
        valkey.client.config_set("appendonly", "yes")


def test_the_version_is_printed(pagemill: Command) -> None:
    done = pagemill("--version")
    assert done.code == EXIT_DONE
    assert done.out.strip()[0].isdigit()


def test_jobs_in_a_bucket_look_the_same(pagemill: Command, site: Site, moto_s3: S3Server) -> None:
    environment = {**moto_s3.environment(), "PAGEMILL_STORAGE": f"s3://{BUCKET}/{uuid4().hex}"}
    job = pagemill("submit", "in.jsonl", *RECORDS, **environment).out.strip()
    bucket = Site.of(
        moto_s3.settings(redis_url=site.settings.redis_url, storage=environment["PAGEMILL_STORAGE"]), site.ledger
    )
    bucket.control.plan(job)
    bucket.work(bucket.ledger.spec(job))
    bucket.control.assemble(job)
    rows = [json.loads(line) for line in pagemill("results", job, **environment).out.splitlines()]
    assert [row["response"] for row in rows] == ["answer 0", "answer 1", None]
