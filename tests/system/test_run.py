"""`pagemill run`: the whole way with nothing set up, and taken up again after a stop."""

import json
import os
import signal
import subprocess
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import EXIT_ROWS_FAILED
from tests.system.mill import DATA, PAGEMILL, Mill, assert_every_row_once, questions, read_jsonl, wait_until

pytestmark = pytest.mark.model


def run_command(source: Path, output: Path | str, *options: str) -> list[str]:
    return [*PAGEMILL, "run", str(source), "-o", str(output), "--model", "demo", "--temperature", "0", *options]


def test_records_in_and_records_out(tmp_path: Path) -> None:
    source, output = DATA / "gsm8k_16.jsonl", tmp_path / "answers.jsonl"
    command = run_command(source, output, "--prompt-column", "question", "--max-tokens", "8", "--show", "1")
    done = subprocess.run(command, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    assert_every_row_once(source, read_jsonl(output.read_bytes()))
    assert b"16 rows answered" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl"]


def test_a_table_in_and_a_folder_of_tables_out(tmp_path: Path) -> None:
    prices = pa.array([Decimal("1.50"), None, Decimal("2.00")], pa.decimal128(8, 2))
    asked = pa.table({"question": ["Say hi.", "Say ho.", None], "price": prices, "raw": [b"\xff", None, b""]})
    pq.write_table(asked, tmp_path / "in.parquet")
    options = ("--output-format", "parquet", "--prompt-column", "question", "--max-tokens", "4", "--show", "1")
    command = run_command(tmp_path / "in.parquet", f"{tmp_path}/out/", *options)
    done = subprocess.run(command, capture_output=True, timeout=200)
    assert done.returncode == EXIT_ROWS_FAILED, done.stderr.decode()
    found = pq.read_table(tmp_path / "out")
    assert found.select(asked.column_names) == asked
    assert [type(text) for text in found.column("response").to_pylist()] == [str, str, type(None)]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".huggingface.yaml", "_manifest.json", "part-00000.parquet"]
    assert b"Say hi." in done.stdout


def test_openai_lines_with_bad_rows_skipped(tmp_path: Path) -> None:
    def line(custom_id: str, **body: object) -> str:
        body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], **body}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long_prompt = [{"role": "user", "content": "word " * 20_000}]
    rows = [line("a"), "{broken", line("b", messages=long_prompt), line("a"), line("c", temperature="warm"), line("d")]
    source.write_text("\n".join(rows))
    done = subprocess.run(run_command(source, output, "--on-bad-row", "skip"), capture_output=True, timeout=200)
    assert done.returncode == 3, done.stderr.decode()
    answered = read_jsonl(output.read_bytes())
    assert [row["custom_id"] for row in answered] == ["a", "d"]
    assert all(row["response"]["body"]["choices"][0]["message"]["content"] for row in answered)
    failed = read_jsonl((tmp_path / "out.errors.jsonl").read_bytes())
    assert [row["response"]["body"]["error"]["code"] for row in failed] == [
        "invalid_json_line",
        "context_length_exceeded",
        "duplicate_custom_id",
        "invalid_type",
    ]


def test_openai_lines_with_bad_rows_fail_before_any_work(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a"}\nnull\n')
    done = subprocess.run(run_command(source, output), capture_output=True, timeout=200)
    assert done.returncode == 1
    listed = read_jsonl((tmp_path / "out.errors.jsonl").read_bytes())
    assert [(error["line"], error["byte"]) for error in listed] == [(1, 0), (2, 19)]
    assert not output.exists()


def test_an_unknown_model_ends_the_run_with_its_name(tmp_path: Path) -> None:
    command = run_command(DATA / "gsm8k_16.jsonl", tmp_path / "out.jsonl", "--prompt-column", "question")
    command[command.index("demo")] = str(tmp_path / "nothing-here")
    done = subprocess.run(command, capture_output=True, timeout=200)
    assert done.returncode == 2
    assert "nothing-here" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_is_taken_up_again(tmp_path: Path) -> None:
    source, output = questions(tmp_path, 48), tmp_path / "answers.jsonl"
    command = run_command(source, output, "--prompt-column", "question", "--max-tokens", "24")
    mill = Mill(tmp_path / "answers.jsonl.pagemill")
    first = subprocess.Popen(command, env=mill.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    (job_id,) = wait_until(lambda: mill.ledger.job_ids(1), 60, "the job")
    wait_until(lambda: mill.ledger.view(job_id).settled, 120, "a committed shard")
    committed = mill.ledger.records(job_id)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130
    assert b"takes the run up again" in said
    done = subprocess.run(command, env=mill.env, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    assert job_id in done.stderr.decode()
    assert_every_row_once(source, read_jsonl(output.read_bytes()))
    assert committed
    assert not mill.state_dir.exists()


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    command = run_command(questions(tmp_path, 48), tmp_path / "out.jsonl", "--prompt-column", "question")
    mill = Mill(tmp_path / "out.jsonl.pagemill")
    run = subprocess.Popen(command, env=mill.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    worker = wait_until(lambda: mill.ledger.workers(), 120, "a live worker")[0]
    pids = [worker.pid, worker.engine_pid, mill.valkey_pid()]
    run.kill()
    run.wait()
    wait_until(lambda: not any(_runs(pid) for pid in pids), 20, "the end of all children")


def _runs(pid: int | None) -> bool:
    return pid is not None and os.path.exists(f"/proc/{pid}")
