"""The command line of a machine that only hands in jobs: nothing is installed there that models need."""

import subprocess
import sys
from pathlib import Path

import pytest

MODELS_NEED = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf", "llguidance", "psutil")


def pagemill(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter in which those modules cannot be imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({MODELS_NEED!r})); sys.argv = ['pagemill', *{arguments!r}]; "
        "from jobs.cli import main; main()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_commands_of_jobs_work_without_what_models_need() -> None:
    shown = pagemill("--help")
    assert shown.returncode == 0, shown.stderr
    assert "submit" in shown.stdout
    assert pagemill("submit", "--help").returncode == 0


def test_a_control_worker_works_without_what_models_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "redis://127.0.0.1:1/0")
    done = pagemill("worker", "--control")
    # It gets as far as to ask for its ledger.
    assert done.returncode == 4, done.stderr
    assert "Redis at redis://127.0.0.1:1/0 does not answer" in done.stderr


def test_a_command_that_needs_more_says_what(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"q": "a"}\n')
    for command in (
        ("estimate", str(source), "--model", "demo", "--prompt-column", "q"),
        ("bench", "model", "--model", "demo"),
    ):
        done = pagemill(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert "needs torch, which is not installed here" in done.stderr
        assert "pip install 'pagemill[worker]'" in done.stderr
