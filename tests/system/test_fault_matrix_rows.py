"""The fault matrix, rows 25 to 27: inputs that are broken, and rows that break what they are given to.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer, or
with the error that is its own and nobody else's.
"""

import gzip
import json
import os
import signal
from dataclasses import replace

import pyarrow as pa

from jobs.errors import ObjectNotFound
from jobs.records import WorkerView
from jobs.submit import enter
from tests.system.fleet import END_S, SHARD_ROWS, Fleet, Job
from tests.system.hurt_worker import FAULTS, LETHAL, NO_ENGINE
from tests.system.mill import wait_until
from tests.system.stub_engine import POISON, REFUSED

LINE_LIMIT = 1024


def line(prompt: str) -> bytes:
    return json.dumps({"prompt": prompt}, ensure_ascii=False).encode()


FLAWED: list[tuple[bytes, str | None, str | None]] = [
    # what stands there, the prompt that is read, the error
    (b"\xef\xbb\xbf" + line("behind a byte order mark"), "behind a byte order mark", None),
    (line("before a carriage return") + b"\r", "before a carriage return", None),
    (line("cut\u2028at\u2029by\u0085text tools"), "cut\u2028at\u2029by\u0085text tools", None),
    (b'{"prompt": "\xff\xfe"}', None, "invalid_json_line"),
    (line("x" * LINE_LIMIT), None, "line_too_long"),
    (b'{"prompt": "no end', None, "invalid_json_line"),
    (b"[" * (LINE_LIMIT - 1), None, "invalid_json_line"),
    (b'["an array"]', None, "not_an_object"),
    (b'{"question": "under another name"}', None, "missing_required_parameter"),
    (line("the last, without a newline"), "the last, without a newline", None),
]
FLAWED_PROMPTS = [prompt for _, prompt, _ in FLAWED]
FLAWED_ERRORS = {index: error for index, (_, _, error) in enumerate(FLAWED) if error is not None}
FLAWED_TEXT = b"\n\n".join(data for data, _, _ in FLAWED)


def the_worker(fleet: Fleet) -> WorkerView:
    return wait_until(fleet.ledger.workers, END_S, "a live worker")[0]


# --- 25: broken inputs ------------------------------------------------------------------------------------------


def test_25_each_flawed_line_is_its_own_error_and_no_line_is_lost(fleet: Fleet) -> None:
    """As a plain file, and as one that is copied because it is compressed."""
    fleet.control()
    fleet.worker()
    zstd = pa.Codec("zstd").compress(FLAWED_TEXT, asbytes=True)
    jobs = [
        fleet.submit(prompts=FLAWED_PROMPTS, data=data, suffix=suffix, max_line_bytes=LINE_LIMIT)
        for data, suffix in [(FLAWED_TEXT, ".jsonl"), (zstd, ".jsonl.zst")]
    ]
    for job in jobs:
        assert fleet.finished(job, errors=FLAWED_ERRORS).failed == 6


def test_25_a_truncated_archive_fails_its_job_before_a_row_is_asked(fleet: Fleet) -> None:
    fleet.control()
    fleet.worker()
    text = b"".join(line(f"question {n}") + b"\n" for n in range(2000))
    archives = {".jsonl.gz": gzip.compress(text), ".jsonl.zst": pa.Codec("zstd").compress(text, asbytes=True)}
    cuts = [(suffix, data[:end]) for suffix, data in archives.items() for end in (len(data) - 3, len(data) // 2)]
    for job in [fleet.submit(data=data, suffix=suffix) for suffix, data in cuts]:
        view = fleet.wait_for_end(job, "failed")
        assert [error.code for error in view.errors] == ["truncated_input"]
        assert fleet.history.states(job.id) == ["validating", "failed"]
        assert_no_result(fleet, job)


def test_25_a_bad_line_fails_a_job_that_wants_all_or_nothing(fleet: Fleet) -> None:
    """The error file has every bad line, by its number."""
    fleet.control()
    job = fleet.submit(prompts=FLAWED_PROMPTS, data=FLAWED_TEXT, max_line_bytes=LINE_LIMIT, on_bad_row="fail")
    view = fleet.wait_for_end(job, "failed")
    errors = [json.loads(error) for error in fleet.stores.read(job.spec.error_url).splitlines()]
    assert {(error["line"] - 1) // 2: error["code"] for error in errors} == FLAWED_ERRORS
    assert view.error_count == len(errors)
    assert_no_result(fleet, job)


def assert_no_result(fleet: Fleet, job: Job) -> None:
    assert fleet.tries(job) == {}
    for url in (job.spec.output_url, job.spec.layout.manifest):
        try:
            fleet.stores.head(url)
        except ObjectNotFound:
            continue
        raise AssertionError(f"{url} is there")


# --- 26: rows that kill -----------------------------------------------------------------------------------------


def test_26_only_the_rows_that_kill_the_engine_are_errors(fleet: Fleet) -> None:
    """Two deaths make suspects of what is in flight, eight at most, and two more at most find one of them. That is for
    each of the two rows, should they not be in flight at once."""
    fleet.control()
    worker = fleet.worker()
    prompts = [f"question {n}" for n in range(20)]
    prompts[5] = prompts[10] = f"some {POISON}"
    job = fleet.submit(prompts=prompts)
    fleet.finished(job, errors={5: "engine_error", 10: "engine_error"})
    assert worker.alive
    deaths = worker.log.read_text().count("the stub engine was given poison")
    assert 3 <= deaths <= 2 * (2 + 2)
    wait_until(lambda: the_worker(fleet).engine_restarts == deaths, END_S, "all deaths counted")
    assert set(fleet.tries(job).values()) == {1}


def test_26_a_row_that_kills_its_worker_costs_its_shard_and_no_other(fleet: Fleet) -> None:
    """After `max_tries`, here three, which count when a shard is handed out: who dies of it never says so. The shard
    beside it dies with it twice, and is then in work alone."""
    fleet.control()
    job = fleet.prepare(prompts=[LETHAL if n == 1 else f"question {n}" for n in range(16)])
    job = replace(job, spec=job.spec.model_copy(update={"max_tries": 3}))
    enter(job.spec, fleet.ledger, fleet.stores, fleet.tokens)
    for tries in (1, 2, 3):
        fleet.wait_for(job, lambda view: view.state == "in_progress" and not view.leased, "all shards are ready")
        doomed = fleet.worker(step_s=0.3, program="tests.system.hurt_worker", **{FAULTS: str(fleet.folder)})
        assert doomed.wait_for_death() == -signal.SIGKILL
        assert fleet.tries(job)[0] == tries
    survivor = fleet.worker(program="tests.system.hurt_worker", **{FAULTS: str(fleet.folder)})
    fleet.finished(job, errors=dict.fromkeys(range(SHARD_ROWS), "engine_error"))
    assert survivor.alive
    assert fleet.tries(job)[0] == 4
    assert max(fleet.tries(job)[shard] for shard in (1, 2, 3)) <= 3


# --- 27: the engine raises, or dies -----------------------------------------------------------------------------


def test_27_a_row_that_the_engine_refuses_is_an_error_and_nothing_restarts(fleet: Fleet) -> None:
    fleet.control()
    fleet.worker()
    prompts = [f"question {n}" for n in range(12)]
    prompts[7] = f"this is {REFUSED}"
    job = fleet.submit(prompts=prompts)
    fleet.finished(job, errors={7: "refused_by_stub"})
    assert the_worker(fleet).engine_restarts == 0
    assert set(fleet.tries(job).values()) == {1}


def test_27_an_engine_that_is_killed_is_started_again_and_asked_again(fleet: Fleet) -> None:
    fleet.control()
    worker = fleet.worker(step_s=0.3)
    job = fleet.submit(80)
    fleet.wait_for(job, lambda view: view.done and view.leased, "the middle of the job")
    killed = the_worker(fleet).engine_pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    fleet.finished(job)
    assert worker.alive
    found = wait_until(lambda: [w for w in fleet.ledger.workers() if w.engine_restarts], END_S, "a restart")[0]
    assert (found.engine_restarts, found.engine_pid == killed) == (1, False)
    assert set(fleet.tries(job).values()) == {1}


def test_27_a_worker_whose_engine_does_not_start_again_ends_and_gives_its_shards_back(fleet: Fleet) -> None:
    """The delays before an engine is started again are a tenth of the product's."""
    fleet.control()
    doomed = fleet.worker(step_s=0.3, program="tests.system.hurt_worker", **{FAULTS: str(fleet.folder)})
    job = fleet.submit(40)
    fleet.wait_for(job, lambda view: view.done and view.leased == 2, "the middle of the job")
    (fleet.folder / NO_ENGINE).touch()
    killed = the_worker(fleet).engine_pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert doomed.wait_for_death() == 0
    assert "the engine does not start again" in doomed.log.read_text()
    assert fleet.view(job).leased == 0
    assert set(fleet.tries(job).values()) <= {0, 1}
    given_back = [shard for shard, tries in fleet.tries(job).items() if tries == 0]
    assert given_back
    fleet.worker()
    fleet.finished(job)
    assert set(fleet.tries(job).values()) == {1}
