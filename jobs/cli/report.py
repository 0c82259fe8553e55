"""`pagemill report`: what a job took and cost."""

from datetime import timedelta
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from jobs.cli.client import open_client
from jobs.cli.inspect import JobArgument
from jobs.cli.options import Json
from jobs.cli.show import print_json, stdout
from jobs.report import Report, Work
from jobs.report import report as report_of


def report(
    job: JobArgument,
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, help="What an hour of one worker costs, in your currency.")
    ] = None,
    json: Json = False,
) -> None:
    """Tokens, speed, where the time went, failures by code, and what it cost."""
    client = open_client()
    found = report_of(client.ledger.spec(job), client.ledger, client.stores, gpu_hour_price)
    print_json(found.as_dict()) if json else _print(found)


def _print(found: Report) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in [*_totals(found), *_times(found), *_costs(found)]:
        table.add_row(f"[bold]{name}[/]", escape(value))
    stdout.print(table)
    if found.failures:
        failures = Table("failure", "rows", box=None)
        for code, rows in found.failures.items():
            failures.add_row(escape(code), f"{rows:,}")
        stdout.print(failures)


def _totals(found: Report) -> list[tuple[str, str]]:
    usage = found.usage
    share = f", {usage.cached_tokens / usage.prompt_tokens:.0%}" if usage.prompt_tokens else ""
    rows = "?" if found.rows is None else f"{found.rows:,}"
    return [
        ("job", f"{found.job_id} ({found.state})"),
        ("model", f"{found.model}; computed by {', '.join(found.engines) or 'nobody yet'}"),
        ("rows", f"{found.ok:,} done, {found.failed:,} failed, of {rows}"),
        ("tokens in", f"{usage.prompt_tokens:,} ({usage.cached_tokens:,} from the prefix cache{share})"),
        ("tokens out", f"{usage.completion_tokens:,}"),
    ]


def _times(found: Report) -> list[tuple[str, str]]:
    phases = found.phases
    named = [
        ("validating", phases.validating),
        ("waiting for a worker", phases.waiting),
        ("in progress", phases.in_progress),
        ("finalizing", phases.finalizing),
    ]
    return [(name, str(timedelta(seconds=seconds))) for name, seconds in named if seconds is not None]


def _costs(found: Report) -> list[tuple[str, str]]:
    work = found.work
    if work is None:
        return []
    costs = [
        ("speed", f"{work.tokens_per_second:,.0f} tokens/s in and out, {work.rows_per_second:,.1f} rows/s"),
        ("occupancy", f"{work.occupancy:.0%} of {work.slots} slots of {work.workers} worker(s) had a shard"),
        *_engine(work),
        ("tail", f"{timedelta(seconds=round(work.tail))} after the last shard began, {work.tail_idle:.0%} of it idle"),
        ("GPU hours", f"{found.gpu_hours:,.3f} (workers with a shard of this job, of attempts that counted)"),
    ]
    return [*costs, ("cost", f"{found.cost:,.2f}")] if found.cost is not None else costs


def _engine(work: Work) -> list[tuple[str, str]]:
    if work.load is None:
        return []
    rows, seats = work.load.rows, work.load.seats
    full = f"{rows:,.1f} sequences in a step in the mean, of {seats:,} seats: {rows / seats:.0%} full"
    return [("engine", f"{full}, and {work.load.tail_idle:.0%} idle with nothing left that waits")]
