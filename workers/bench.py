"""The commands `pagemill bench jobs` and `pagemill bench model`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.table import Column, Table

from engine.config import EngineConfig
from engine.errors import EngineError
from jobs.cli.options import EngineOptions, Json, Model, with_groups
from jobs.cli.show import print_json, stderr, stdout
from jobs.errors import UsageError
from jobs.profile import Profile, profile_path
from jobs.settings import settings
from jobs.storage import Stores

if TYPE_CHECKING:
    from workers.bench_jobs import JobsBench

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command("jobs")
def jobs(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the job.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    storage: Annotated[
        str | None,
        typer.Option(help="A bucket's prefix to measure with; what the job puts there is removed. Default: a folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Rows a second from submit to manifest with a stub for an engine: what the job plane itself can do.

    A line for each stage: by the clock, and the CPU time for each row of every process but the store's, which is what
    to compare by on a machine that is not idle.
    """
    from workers.bench_jobs import bench_jobs

    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        own = {"state_dir": Path(folder), "redis_url": "", "storage": storage or ""}
        found = bench_jobs(rows, workers, settings().model_copy(update=own))
    if json:
        print_json(found.as_dict())
        return
    print_jobs_bench(found)


def print_jobs_bench(found: "JobsBench") -> None:
    """A line for each stage: its time, and the CPU time for each row, of whom and of all."""
    who = list(found.total.cpu)
    names = ("seconds", "rows/s", *(f"µs CPU: {name}" if name == who[0] else name for name in who), "all")
    table = Table("stage", *(Column(name, justify="right") for name in names), box=None)
    for stage in (*found.stages, found.total):
        cpu = [*stage.cpu.values(), sum(stage.cpu.values())]
        table.add_row(
            stage.name,
            f"{stage.seconds:,.2f}",
            f"{stage.rows_per_second:,.0f}",
            *(f"{seconds / found.rows * 1e6:,.1f}" for seconds in cpu),
        )
    stdout.print(table)
    stdout.print(
        f"{found.rows:,} rows, {decimal(found.input_bytes)}; {found.workers} worker process(es), {found.storage}; "
        f"at most {decimal(found.peak_bytes)} resident in a process"
    )


@bench.command("model")
@with_groups
def model(model: Model, engine: EngineOptions, json: Json = False) -> None:
    """Measure prefill and decode of a model here, and keep it: `pagemill estimate` goes by it."""
    from engine import LLM
    from workers.bench_model import measure

    config = settings()
    try:
        EngineConfig(model, **engine.given)
        stderr.print(f"Loading {model} ...")
        profile = measure(LLM(model, **engine.given), model)
    except EngineError as error:
        raise UsageError(error.message, hint=error.hint, code=error.code) from error
    path = profile_path(model, config)
    Stores(config).put(str(path), profile.model_dump_json(indent=1).encode())
    print_json(profile.model_dump(mode="json")) if json else _print(profile, path)


def _print(profile: Profile, path: Path) -> None:
    stdout.print(profile.basis)
    table = Table("", Column("tokens/s", justify="right"), box=None)
    table.add_row("prefill", f"{profile.prefill_tokens_per_second:,.0f}")
    for rate in profile.decode:
        table.add_row(f"decode, {rate.rows:,} rows", f"{rate.tokens_per_second:,.0f}")
    stdout.print(table)
    stdout.print(f"KV pool: {profile.kv_tokens:,} tokens. Kept in {path}.")
