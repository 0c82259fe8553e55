"""Benchmarks measure, and say what they measured; and `estimate` goes by them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs import settings
from jobs.errors import UsageError
from jobs.estimate import Estimate, Longest, Prompts
from jobs.settings import Settings
from jobs.storage import Stores
from tests.engine.models_fixture import tiny_llama
from tests.servers import BUCKET, S3Server
from workers.bench import bench
from workers.bench_jobs import bench_jobs
from workers.bench_model import _Prompts


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEMILL_STATE_DIR", str(tmp_path / "state"))
    settings.settings.cache_clear()
    yield tmp_path / "state"
    settings.settings.cache_clear()


def test_the_job_plane_is_measured_stage_by_stage(tmp_path: Path) -> None:
    found = bench_jobs(500, 1, Settings(state_dir=tmp_path / "s", redis_url="", storage="", max_shard_rows=100))
    assert [stage.name for stage in found.stages] == ["submit", "plan", "run", "assemble"]
    assert all(stage.rows_per_second == pytest.approx(500 / stage.seconds) for stage in found.stages)
    assert found.total.seconds == pytest.approx(sum(stage.seconds for stage in found.stages))
    assert found.as_dict()["total"]["rows_per_second"] > 0
    assert list(found.total.cpu) == ["bench", "workers", "engines", "valkey"]
    run = found.stages[2].cpu
    assert run["workers"] > max(run["bench"], run["valkey"])
    assert found.peak_bytes > 10_000_000


def test_a_model_is_measured_and_an_estimate_goes_by_it(state_dir: Path, tmp_path: Path) -> None:
    import typer

    from workers.estimate import estimate

    model = str(tiny_llama(tmp_path / "model", tokenizer=True))
    run = CliRunner().invoke
    options = ["--dtype", "float32", "--device", "cpu", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    measured = run(bench, ["model", "--model", model, *options, "--json"])
    assert measured.exit_code == 0, measured.output
    profile = json.loads(measured.stdout)
    assert [rate["rows"] for rate in profile["decode"]] == [1, 4]
    assert profile["prefill_tokens_per_second"] > 0
    assert all(rate["tokens_per_second"] > 0 for rate in profile["decode"])

    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n} is a number"}) + "\n" for n in range(30)))
    app = typer.Typer()
    app.command()(estimate)
    arguments = [str(source), "--model", model, "--prompt-column", "prompt", "--max-tokens", "5"]
    found = json.loads(run(app, [*arguments, "--json"]).stdout)
    assert (found["rows"], found["answer_tokens"]) == (30, 150)
    assert found["prompts"]["longest"]["tokens"] > len("10 is a number")
    assert found["duration"]["total"] > 0
    shown = run(app, arguments).stdout
    assert "float32 on cpu" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model", "state"]

    other = str(tiny_llama(tmp_path / "other", tokenizer=True))
    shown = run(app, [*arguments[:2], other, *arguments[3:]]).stdout
    assert "not measured here: `pagemill bench model" in shown
    assert "on one worker" not in shown
    assert "rows at once (0.00 GiB of weights and " in shown
    assert "bytes a token, on this machine)" in shown
    shown = run(app, [*arguments[:2], other, *arguments[3:], "--gpu-memory", "24"]).stdout
    assert "on a GPU of 24 GiB" in shown


def test_an_estimate_of_a_quantised_model_goes_by_what_was_measured_of_it(state_dir: Path, tmp_path: Path) -> None:
    import typer

    from workers.estimate import estimate

    model = str(tiny_llama(tmp_path / "model", tokenizer=True))
    run = CliRunner().invoke
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    measured = run(bench, ["model", "--model", model, "--device", "cpu", "--quantize", "int8", *sizes, "--json"])
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)["dtype"] == "int8"

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "a"}) + "\n")
    app = typer.Typer()
    app.command()(estimate)
    arguments = [str(source), "--model", model, "--prompt-column", "prompt", "--max-tokens", "5"]
    assert "not measured here" in run(app, arguments).stdout
    assert "int8 on cpu" in run(app, [*arguments, "--quantize", "int8"]).stdout
    refused = run(app, [*arguments, "--quantize", "int8", "--gpu-memory", "24"])
    assert isinstance(refused.exception, UsageError)
    assert "quantize int8 is for CPUs" in refused.exception.message
    unknown = run(app, [*arguments, "--quantize", "../../int8"])
    assert isinstance(unknown.exception, UsageError)
    assert "quantize must be one of int8, fp8, int4" in unknown.exception.message


def test_prompts_of_a_benchmark_share_no_beginning() -> None:
    from engine.config import EngineConfig
    from workers.stub_engine import StubCore

    prompts = _Prompts(StubCore(EngineConfig("stub")).info)
    many = prompts.some(1000, 8)
    assert len({tuple(prompt[:2]) for prompt in many}) == 1000
    assert {len(prompt) for prompt in many} == {8}


def test_the_job_plane_is_measured_on_s3_and_leaves_nothing_there(tmp_path: Path, rclone_s3: S3Server) -> None:
    prefix = f"s3://{BUCKET}/bench"
    settings = rclone_s3.settings(state_dir=tmp_path / "s", redis_url="", storage=prefix)
    assert rclone_s3.pid is not None
    found = bench_jobs(50, 1, settings, {"rclone": rclone_s3.pid})
    assert (found.storage, list(found.total.cpu)[-1]) == (prefix, "rclone")
    assert list(Stores(settings).list(f"{prefix}/")) == []


def test_an_estimate_of_vectors_says_nothing_of_answers() -> None:
    from workers.estimate import _of_prompts

    prompts = Prompts(3, 0, 30, 10.0, 10, 10, Longest(0, 1, 10), {16: 3}, 0.0, 32)
    found = Estimate(3, 0, (), 1, False, prompts, 0, True, None, None)
    assert "answer tokens" not in dict(_of_prompts(found))
    assert dict(_of_prompts(replace(found, answer_tokens=9)))["answer tokens"] == "9 at most, by their limits"
