"""The command `pagemill estimate`: it is here because it takes the model's own tokenizer."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.table import Column, Table

from engine.config import EngineConfig, KvCacheDtype, Quantize
from engine.errors import EngineError
from engine.prompts import Prompt as EnginePrompt
from engine.prompts import PromptEncoder
from jobs.cli.options import INPUT_HELP, JobOptions, Json, Model, with_groups
from jobs.cli.show import print_json, stdout
from jobs.errors import UsageError
from jobs.estimate import Encode, Estimate
from jobs.estimate import estimate as estimate_of
from jobs.profile import Capacity, load_profile
from jobs.settings import settings
from jobs.storage import Stores
from jobs.submit import prepare

_BAR = 40
_GIB = 1024**3


@with_groups
def estimate(
    source: Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUT_HELP)],
    model: Model,
    job: JobOptions,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Count the tokens of so many rows; of a larger input, of shards all over it.")
    ] = 20_000,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="How long you expect answers to be. Default: their limits.")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0.1, help="What fits on a GPU of so many GiB. Default: what was measured, or this machine."),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="int8, fp8 or int4: for workers that have the same option.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="int8, fp8 and others: for workers that have the same option.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    json: Json = False,
) -> None:
    """Rows, tokens, shared prefixes, what fits, and the time it takes by `pagemill bench model`; runs nothing."""
    config = settings()
    with _engine_errors_as_usage_errors(), tempfile.TemporaryDirectory(prefix="pagemill-estimate-") as folder:
        engine = EngineConfig(
            model,
            quantize=cast(Quantize | None, quantize),
            kv_cache_dtype=cast(KvCacheDtype, kv_cache_dtype),
        )
        # Nothing is left behind: where the planner has to copy the input, it does so here.
        local = config.model_copy(update={"storage": folder})
        stores = Stores(local)
        spec = prepare(
            source,
            model=model,
            stores=stores,
            settings=local,
            rows=job.rows,
            input_options=job.input_options,
            max_line_bytes=job.max_line_bytes,
            sampling=job.sampling,
            pooling=job.embedding,
            on_bad_row=job.on_bad_row,
            model_aliases=tuple(job.model_alias or ()),
            lora=job.lora,
        )
        profile = load_profile(model, engine.quantize, config, kv_cache_dtype=engine.kv_cache_dtype)
        found = estimate_of(
            spec,
            stores,
            local,
            _encoder(model, trust_remote_code),
            profile=profile,
            capacity=_capacity(engine, gpu_memory) if profile is None or gpu_memory else None,
            max_rows=max_rows,
            mean_answer=answer_tokens,
        )
    print_json(found.as_dict()) if json else _print(found, engine)


@contextmanager
def _engine_errors_as_usage_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise UsageError(error.message, hint=error.hint, code=error.code) from error


def _encoder(model: str, trust_remote_code: bool) -> Encode:
    # Only now: it takes seconds, and the command line is put together for each command.
    from engine.loader import load_tokenizer

    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise UsageError(f"{model} has no tokenizer: its tokens cannot be counted.")
    encoder = PromptEncoder(tokenizer, len(tokenizer))

    def encode(prompts: Sequence[Any]) -> Sequence[Sequence[int] | Exception]:
        return encoder.encode(cast(Sequence[EnginePrompt], prompts))

    return encode


def _capacity(engine: EngineConfig, gpu_memory: float | None) -> Capacity | None:
    from engine.capacity import kv_capacity

    found = kv_capacity(engine, None if gpu_memory is None else int(gpu_memory * _GIB))
    if found is None:
        return None
    where = "this machine" if gpu_memory is None else f"a GPU of {gpu_memory:g} GiB"
    takes = f"{found.weight_bytes / _GIB:.2f} GiB of weights and {found.kv_bytes_per_token:,} bytes a token"
    return Capacity(
        kv_tokens=found.kv_tokens,
        max_num_seqs=found.max_num_seqs,
        max_model_len=found.max_model_len,
        block_size=found.block_size,
        basis=f"{takes}, on {where}",
    )


def _print(found: Estimate, engine: EngineConfig) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in [*_of_rows(found), *_of_prompts(found), *_of_time(found, engine)]:
        table.add_row(f"[bold]{name}[/]", escape(value))
    stdout.print(table)
    if found.prompts is not None:
        most = max(found.prompts.histogram.values())
        bars = Table(Column("tokens", justify="right"), Column("rows", justify="right"), "", box=None)
        for limit, rows in found.prompts.histogram.items():
            bars.add_row(f"<= {limit:,}", f"{rows:,}", "#" * max(1, rows * _BAR // most))
        stdout.print(bars)


def _of_rows(found: Estimate) -> list[tuple[str, str]]:
    rows = [("rows", f"{found.rows:,} in {found.shards:,} shards, {found.bad_rows:,} of them bad")]
    if found.first_errors:
        first = found.first_errors[0]
        rows.append(("first bad row", f"line {first.line}: {first.message} ({first.code})"))
    return rows


def _of_prompts(found: Estimate) -> list[tuple[str, str]]:
    prompts = found.prompts
    if prompts is None:
        return [("prompts", "none that can be encoded")]
    basis = f" (from {prompts.rows:,} rows, scaled up)" if found.sampled else ""
    facts = [
        ("prompt tokens", f"{prompts.total:,}{basis}"),
        ("a prompt", f"{prompts.mean:,.0f} tokens in the mean, {prompts.median:,} median, {prompts.p99:,} at 99%"),
        ("longest row", f"line {prompts.longest.line}: {prompts.longest.tokens:,} tokens"),
        ("shared prefixes", f"{prompts.shared:.1%} of the tokens, in blocks of {prompts.block_size}"),
    ]
    if prompts.refused:
        facts.append(("not encodable", f"{prompts.refused:,} rows"))
    if found.answer_tokens == 0:
        return facts  # vectors are wanted
    if found.answer_tokens is None:
        return [*facts, ("answer tokens", "without a limit: give --answer-tokens or --max-tokens")]
    kind = "at most, by their limits" if found.answers_are_limits else "as you expect"
    return [*facts, ("answer tokens", f"{found.answer_tokens:,} {kind}")]


def _of_time(found: Estimate, engine: EngineConfig) -> list[tuple[str, str]]:
    facts = _of_fit(found)
    if found.duration is None:
        if found.fit is not None and not found.fit.rows_at_once:
            return facts
        options = f" --quantize {engine.quantize}" if engine.quantize else ""
        if engine.kv_cache_dtype != "auto":
            options += f" --kv-cache-dtype {engine.kv_cache_dtype}"
        unmeasured = f"not measured here: `pagemill bench model --model {engine.model}{options}` does"
        why = "answers have no limit" if found.answer_tokens is None else unmeasured
        return [*facts, ("time", f"unknown: {why}")]
    took = found.duration
    whole, prefill, decode = (timedelta(seconds=round(s)) for s in (took.total, took.prefill, took.decode))
    return [
        *facts,
        ("time", f"{whole} on one worker: {prefill} for prompts, {decode} for answers"),
        ("GPU hours", f"{took.gpu_hours:,.3f}"),
        ("based on", took.basis),
    ]


def _of_fit(found: Estimate) -> list[tuple[str, str]]:
    fit = found.fit
    if fit is None:
        return []
    if not fit.rows_at_once:
        return [("KV pool", f"none: the model itself does not fit ({fit.basis})")]
    facts = [("KV pool", f"{fit.kv_tokens:,} tokens, {fit.rows_at_once:,} rows at once ({fit.basis})")]
    return [*facts, ("too long", f"{fit.too_long:,} of the rows that were counted")] if fit.too_long else facts
