"""One worker process by itself: how it stops, and what it leaves behind."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from jobs.local.supervisor import Child, Supervisor
from jobs.local.valkey import valkey_child
from tests.system.mill import MODEL, PAGEMILL, Mill, assert_every_row_once, questions, read_jsonl, wait_until

pytestmark = pytest.mark.model

STOP_S = 5


def test_a_busy_worker_stops_at_once_and_no_try_counts(tmp_path: Path) -> None:
    mill = Mill(tmp_path)
    with Supervisor(tmp_path / "log", grace=5) as services:
        services.start(valkey_child(mill.settings))
        services.start(Child("control", [*PAGEMILL, "worker", "--control"], mill.env))
        with (tmp_path / "worker.log").open("wb") as log:
            worker = subprocess.Popen([*PAGEMILL, "worker", "--model", MODEL], env=mill.env, stdout=log, stderr=log)
        wait_until(mill.ledger.workers, 120, "a live worker")
        job_id = mill.submit(
            questions(tmp_path, 64), "--prompt-column", "question", "--max-tokens", "200", "--ignore-eos"
        )
        wait_until(lambda: mill.ledger.view(job_id).leased, 60, "a leased shard")
        wait_until(lambda: any(w.tokens_per_second > 0 for w in mill.ledger.workers()), 60, "a busy engine")

        asked = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, (tmp_path / "worker.log").read_text()
        # The promise is the product's, not this machine's: five seconds, whatever the engine is in the middle of.
        assert time.monotonic() - asked < STOP_S

        view = mill.ledger.view(job_id)
        assert (view.state, view.leased, view.in_flight) == ("in_progress", 0, 0)
        assert set(mill.tries(job_id).values()) <= {"0"}
        assert mill.ledger.workers() == []


def test_a_worker_for_an_unknown_model_says_so(tmp_path: Path) -> None:
    mill = Mill(tmp_path)
    with Supervisor(tmp_path / "log", grace=5) as services:
        services.start(valkey_child(mill.settings))
        done = mill.pagemill("worker", "--model", str(tmp_path / "nothing-here"))
    assert done.returncode == 2
    assert "nothing-here" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_job_whose_tokens_were_all_deleted_before_any_was_taken_is_done(tmp_path: Path) -> None:
    """Slots that are at work already go on without tokens; here only the sweeper can bring the job to a worker."""
    mill = Mill(tmp_path)
    with Supervisor(tmp_path / "log", grace=5) as services:
        services.start(valkey_child(mill.settings))
        services.start(Child("control", [*PAGEMILL, "worker", "--control"], mill.env))
        source = questions(tmp_path, 16)
        job_id = mill.submit(source, "--prompt-column", "question", "--max-tokens", "4", "--temperature", "0")
        wait_until(lambda: mill.ledger.client.llen(mill.queue()) == 2, 30, "a token for each shard")
        assert mill.ledger.client.delete(mill.queue()) == 1
        services.start(Child("worker", [*PAGEMILL, "worker", "--model", MODEL], mill.env))
        view = mill.wait_for_end(job_id)
        assert (view.state, view.done) == ("completed", 16)
        assert_every_row_once(source, read_jsonl(mill.pagemill("results", job_id).stdout))
