"""What is killed in the middle of a job, or lost on the way, costs time and nothing else."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.broker import Tokens, make_app
from tests.system.mill import MODEL, Mill, assert_every_row_once, questions, read_jsonl, wait_until

pytestmark = pytest.mark.model

ROWS = 48
OPTIONS = ("--prompt-column", "question", "--max-tokens", "24", "--temperature", "0")


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    # With more seats, all rows would be in work at once, and a job have no middle.
    with Mill(tmp_path_factory.mktemp("mill")).up("--max-num-seqs", "8") as mill:
        yield mill


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return questions(tmp_path_factory.mktemp("input"), ROWS)


@pytest.fixture(scope="module")
def undisturbed(mill: Mill, source: Path) -> list[str]:
    """The answers of a job to which nothing happened."""
    return answers(mill, source, mill.submit(source, *OPTIONS))


def answers(mill: Mill, source: Path, job_id: str) -> list[str]:
    view = mill.wait_for_end(job_id)
    assert (view.state, view.done, view.failed) == ("completed", ROWS, 0)
    rows = read_jsonl(mill.pagemill("results", job_id).stdout)
    assert_every_row_once(source, rows)
    return [row["response"] for row in rows]


def kill_worker(mill: Mill) -> None:
    os.kill(mill.worker().pid, signal.SIGKILL)


def kill_engine(mill: Mill) -> None:
    pid = mill.worker().engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kill_valkey(mill: Mill) -> None:
    before = mill.valkey_pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: mill.valkey_pid() != before, 30, "another Valkey")


def delete_all_tokens(mill: Mill) -> None:
    """There are more tokens than slots, so that some wait in the queue."""
    client = mill.ledger.client
    wait_until(lambda: client.llen(mill.queue()), 30, "tokens in the queue")
    assert client.delete(mill.queue()) == 1


def send_every_token_thrice(mill: Mill, job_id: str) -> None:
    """Twice more each, beside those that the planner sent."""
    shards = mill.ledger.view(job_id).shards
    assert shards is not None
    assert shards > 1
    Tokens(make_app(mill.settings)).work(MODEL, 2 * shards)
    assert mill.ledger.client.llen(mill.queue()) > shards


@pytest.mark.parametrize("fault", [kill_worker, kill_engine, kill_valkey], ids=lambda fault: fault.__name__)
def test_a_job_survives(fault: Callable[[Mill], None], mill: Mill, source: Path, undisturbed: list[str]) -> None:
    job_id = mill.submit(source, *OPTIONS)
    mill.wait_for_work(job_id, rows=4)
    fault(mill)
    assert answers(mill, source, job_id) == undisturbed


def test_a_job_ends_when_every_token_is_deleted(mill: Mill, source: Path, undisturbed: list[str]) -> None:
    job_id = mill.submit(source, *OPTIONS)
    wait_until(lambda: mill.ledger.state(job_id) == "in_progress", 30, "a planned job")
    delete_all_tokens(mill)
    assert answers(mill, source, job_id) == undisturbed


def test_tokens_sent_three_times_change_nothing(mill: Mill, source: Path, undisturbed: list[str]) -> None:
    job_id = mill.submit(source, *OPTIONS)
    wait_until(lambda: mill.ledger.state(job_id) == "in_progress", 30, "a planned job")
    send_every_token_thrice(mill, job_id)
    assert answers(mill, source, job_id) == undisturbed
    assert set(mill.tries(job_id).values()) == {"1"}
