"""What is said on the command line of a worker is what its engine is asked for."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine.config import EngineConfig
from jobs.cli.options import EngineOptions
from workers.cli import worker


def served(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> EngineConfig:
    """The configuration with which `pagemill worker` would serve a model."""
    configs: list[EngineConfig] = []

    def serve_model(settings: Any, config: EngineConfig, **others: Any) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("workers.app.serve_model", serve_model)
    app = typer.Typer()
    app.command()(worker)
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return configs[0]


def test_quantize_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, "--model", "demo", "--quantize", "int8") == EngineConfig("demo", quantize="int8")
    assert served(monkeypatch, "--model", "demo") == EngineConfig("demo")


def test_a_worker_that_is_started_for_a_job_is_told_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(
        dtype="bfloat16",
        quantize="int8",
        kv_cache_dtype="int8",
        device="cpu",
        max_num_seqs=7,
        enable_prefix_caching=False,
        num_threads=1,
    )
    assert served(monkeypatch, "--model", "demo", *options.argv) == EngineConfig("demo", **options.given)
