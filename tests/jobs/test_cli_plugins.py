"""The command line of a machine that only hands in jobs: nothing is installed there that models need."""

import subprocess
import sys

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


def test_a_command_that_needs_more_says_what() -> None:
    done = pagemill("estimate", "in.jsonl", "--model", "demo")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`pagemill estimate` needs numpy, which is not installed here" in done.stderr
    assert "pip install 'pagemill[worker]'" in done.stderr
