"""The commands of `pagemill bench`."""

import tempfile
from enum import StrEnum
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
    from workers.bench_engine import EngineRun
    from workers.bench_jobs import JobsBench
    from workers.bench_kernels import KernelBench


class Workloads(StrEnum):
    """What `bench engine` knows to measure."""

    W1 = "W1"
    W2 = "W2"
    W3 = "W3"
    W4 = "W4"
    W5 = "W5"


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
    path = profile_path(model, engine.quantize, config, kv_cache_dtype=engine.kv_cache_dtype)
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


@bench.command("engine")
@with_groups
def engine(
    engine: EngineOptions,
    workloads: Annotated[
        list[Workloads] | None, typer.Argument(help="Which to measure. Default: all, in this order.")
    ] = None,
    model: Model = "demo",
    scale: Annotated[float, typer.Option(min=0.001, max=1, help="Measure this share of the rows, for a look.")] = 1.0,
    peer: Annotated[
        str | None,
        typer.Option(
            help="A Python interpreter that has vLLM, OpenVINO GenAI or llama.cpp: how many times its tokens a second."
        ),
    ] = None,
    peer_preload: Annotated[
        str, typer.Option(help="Shared libraries to preload into the peer, with colons between: vLLM wants tcmalloc.")
    ] = "",
    json: Json = False,
) -> None:
    """Tokens a second on five workloads of real text, and what share of this machine's limit that is.

    W1: mixed lengths. W2: one prefix for all. W3: long prompts. W4: long answers. W5: a tree of prefixes in a KV pool
    that holds a quarter of it, also in the order of submission. The end of an answer is ignored, tokens are the
    likeliest, and loading is not counted.
    """
    from workers.bench_engine import bench_engine

    runs = []
    try:
        config = EngineConfig(model, **engine.given)
        chosen = workloads or list(Workloads)
        for run in bench_engine(config, engine.given, chosen, scale=scale, python=peer, preload=peer_preload):
            stderr.print(f"{run.name}: {run.seconds:,.2f} s")
            runs.append(run)
    except EngineError as error:
        raise UsageError(error.message, hint=error.hint, code=error.code) from error
    print_json([run.as_dict() for run in runs]) if json else _print_engine(runs)


def _print_engine(runs: "list[EngineRun]") -> None:
    names = (
        "rows",
        "seconds",
        "new tokens/s",
        "prompt tokens/s",
        "TFLOP",
        "of the ceiling",
        "floor s",
        "prefix saved",
        "× peer",
    )
    table = Table("", *(Column(name, justify="right") for name in names), box=None)
    for run in runs:
        table.add_row(
            f"{run.name} {run.title}",
            f"{run.rows:,}",
            f"{run.seconds:,.2f}",
            f"{run.new_tokens / run.seconds:,.0f}",
            f"{run.prompt_tokens / run.seconds:,.0f}",
            "" if run.flops is None else f"{run.flops / 1e12:,.2f}",
            "" if run.share is None else f"{run.share:.0%}",
            "" if run.floor_seconds is None else f"{run.floor_seconds:,.2f}",
            "" if run.saved_share is None else f"{run.saved_share:.0%}",
            "" if run.ratio is None else f"{run.ratio:.2f} {run.peer}",
        )
    stdout.print(table)
    for run in runs:
        measured = run.ceilings
        stdout.print(
            f"Ceilings before {run.name}, GFLOP/s: bf16 {measured.bf16 / 1e9:,.0f}, int8 {measured.int8 / 1e9:,.0f}, "
            f"fp32 {measured.fp32 / 1e9:,.0f}; the model's products are {run.products}"
        )


@bench.command("kernels")
def kernels(
    model: Model = "demo",
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    json: Json = False,
) -> None:
    """How near each kernel comes to the limit of this machine, at a model's shapes, and where a step's time goes.

    The limit is that of large products or of large reads, measured here, whichever binds. Above 100 %: what is small
    enough for the processor's caches.
    """
    from workers.bench_kernels import bench_kernels

    try:
        found = bench_kernels(model, num_threads)
    except EngineError as error:
        raise UsageError(error.message, hint=error.hint, code=error.code) from error
    print_json(found.as_dict()) if json else _print_kernels(found)


def _print_kernels(found: "KernelBench") -> None:
    right = ("µs", "GFLOP/s", "GB/s", "of the limit")
    table = Table("kernel", "shape", *(Column(name, justify="right") for name in right), "limited by", box=None)
    for run in found.kernels:
        table.add_row(
            run.name,
            run.shape,
            f"{run.seconds * 1e6:,.0f}",
            f"{run.flops / run.seconds / 1e9:,.0f}" if run.flops else "",
            f"{run.bytes / run.seconds / 1e9:,.1f}",
            f"{run.share:.0%}",
            run.bound,
        )
    stdout.print(table)
    parts = ("ms", "linears", "attention", "glue", "other")
    table = Table("forward pass", *(Column(name, justify="right") for name in parts), box=None)
    for step in found.steps:
        shares = (f"{share:.1%}" for share in (step.linear, step.attention, step.glue, step.other))
        table.add_row(step.shape, f"{step.seconds * 1e3:,.1f}", *shares)
    stdout.print(table)
    gemm, memory = found.gemm, found.memory
    stdout.print(
        f"Measured limits: bf16 {gemm.bf16 / 1e9:,.0f}, int8 {gemm.int8 / 1e9:,.0f}, fp32 {gemm.fp32 / 1e9:,.0f} "
        f"GFLOP/s; read {memory.read / 1e9:,.1f}, copy {memory.copy / 1e9:,.1f} GB/s"
    )
