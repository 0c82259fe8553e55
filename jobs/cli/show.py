"""Jobs on a terminal: a line, a page, a progress bar."""

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from jobs.connection import UNANSWERED, Patience
from jobs.errors import EXIT_DONE, EXIT_JOB_FAILED, EXIT_ROWS_FAILED, RowError
from jobs.ledger import Ledger
from jobs.records import JobView

_PIPE_WIDTH = 10_000
_REFRESH_S = 0.5
_SHOWN_ERRORS = 10

# A pipe has no width: what is cut to fit one cannot be copied.
stdout = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
stderr = Console(stderr=True, soft_wrap=True, highlight=False)

_COLORS = {"completed": "green", "failed": "red", "cancelled": "yellow", "expired": "yellow"}


def exit_code(view: JobView) -> int:
    """The exit code for a job that has ended."""
    if view.state != "completed":
        return EXIT_JOB_FAILED
    return EXIT_ROWS_FAILED if view.failed else EXIT_DONE


def print_json(value: object) -> None:
    typer.echo(json.dumps(value))


def print_job(view: JobView) -> None:
    """A job with all that can be said of it."""
    table = Table.grid(padding=(0, 2))
    rows = "?" if view.rows is None else str(view.rows)
    facts: list[tuple[str, str]] = [
        ("job", view.id),
        ("state", _colored_state(view)),
        ("model", view.model),
        ("created", str(datetime.fromtimestamp(view.created_at))),
        ("queue", terms_of(view)),
        ("rows", f"{view.done} done, {view.failed} failed, {view.in_flight} in flight, of {rows}"),
        ("shards", f"{view.settled} settled, {view.leased} in work, of {view.shards or '?'}"),
        (
            "tokens",
            f"{view.usage.prompt_tokens} in ({view.usage.cached_tokens} cached), {view.usage.completion_tokens} out",
        ),
    ]
    if view.parent:
        facts.append(("retries", f"the failed rows of {view.parent}"))
    if view.started_at and view.ended_at:
        facts.append(("took", str(timedelta(seconds=view.ended_at - view.started_at))))
    facts += [
        (name, url)
        for name, url in (("output", view.output_url), ("errors", view.error_url), ("remaining", view.remaining_url))
        if url and not (name == "output" and view.state == "failed")
    ]
    if view.reason:
        facts.append(("waiting", view.reason))
    for name, value in facts:
        table.add_row(f"[bold]{name}[/]", value if name == "state" else _plain(value))
    stdout.print(table)
    print_errors(view)


def state_of(view: JobView) -> str:
    """The state in words, whether the job is held, and what is to be known of a result before it is used."""
    if view.paused:
        return f"{view.state}, paused"
    if view.state == "completed" and view.failed:
        return f"completed, {view.failed:,} of {view.rows:,} rows failed" if view.done else "completed, all rows failed"
    return view.state


def _colored_state(view: JobView) -> str:
    color = _COLORS.get(view.state, "cyan")
    if view.state == "completed" and view.failed:
        color = "yellow" if view.done else "red"
    return f"[{color}]{state_of(view)}[/]"


def terms_of(view: JobView) -> str:
    """Where the job stands among others, and until when."""
    weight = "" if view.weight == 1 else f", weight {view.weight:g}"
    until = f", expires {datetime.fromtimestamp(view.expires_at)}" if view.expires_at else ""
    return f"priority {view.priority}, tenant {view.tenant}{weight}{until}"


def print_errors(view: JobView) -> None:
    """The bad rows, each with its place; the first few of many."""
    for error in view.errors[:_SHOWN_ERRORS]:
        stderr.print(f"[red]{_plain(_place(error))}[/]{_plain(error.message)} [dim]({error.code})[/]")
    if view.error_count > _SHOWN_ERRORS:
        where = f"; all are in {view.error_url}" if view.error_url else ""
        stderr.print(f"... and {view.error_count - _SHOWN_ERRORS} more bad rows{where}")


def _place(error: RowError) -> str:
    line = f"line {error.line}" if error.line is not None else ""
    byte = f"byte {error.byte}" if error.byte is not None else ""
    named = [part for part in (error.file, line, byte) if part]
    return f"{', '.join(named)}: " if named else ""


def print_jobs(views: list[JobView]) -> None:
    table = Table(
        Column("job", no_wrap=True, overflow="fold"),
        "state",
        "model",
        "tenant",
        "priority",
        "rows",
        "failed",
        "created",
        box=None,
    )
    for view in views:
        done = f"{view.done + view.failed}/{'?' if view.rows is None else view.rows}"
        created = datetime.fromtimestamp(view.created_at).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            view.id,
            _colored_state(view),
            _plain(view.model),
            view.tenant,
            str(view.priority),
            done,
            str(view.failed),
            created,
        )
    stdout.print(table)


def follow(
    job_id: str,
    ledger: Ledger,
    *,
    quiet: bool = False,
    own_worker: bool = False,
    check: Callable[[], None] = lambda: None,
) -> JobView:
    """Wait until a job has ended, with a progress bar on stderr. `check` may raise to end the wait.

    A server that does not answer is waited for, for some minutes.

    With `own_worker` the caller has started one, and as long as none serves the model, it is loading it.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    patience = Patience()
    with Progress(*columns, console=stderr, disable=quiet, transient=False) as progress:
        task = progress.add_task("starting", total=None, rate="")
        while True:
            try:
                view = ledger.view(job_id)
                serving = [worker for worker in ledger.workers() if worker.model == view.model]
            except UNANSWERED as error:
                progress.update(task, description="Redis does not answer", rate="")
                check()
                patience.bear(error)
                continue
            patience.answered()
            rate = sum(worker.tokens_per_second for worker in serving)
            loading = own_worker and not serving and not view.terminal
            progress.update(
                task,
                description="loading the model" if loading else view.reason or view.state.replace("_", " "),
                total=view.rows,
                completed=view.done + view.failed + view.in_flight,
                rate=f"{rate:,.0f} tokens/s" if rate and not view.terminal else "",
            )
            if view.terminal:
                return view
            check()
            time.sleep(_REFRESH_S)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
