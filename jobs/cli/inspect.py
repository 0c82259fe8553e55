"""Looking at jobs, and fetching what they made."""

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

from jobs.cli.client import Client, open_client
from jobs.cli.options import Json
from jobs.cli.show import exit_code, follow, print_errors, print_job, print_jobs, print_json, stderr
from jobs.errors import EXIT_DONE, UnreadableJob, UsageError
from jobs.follow import follow_results
from jobs.news import News
from jobs.output import Output
from jobs.reading import copy_output, json_lines, output_files
from jobs.records import JobView
from jobs.recover import is_lost

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
To = Annotated[
    str | None, typer.Option("--output", "-o", help="A file or folder to write to instead of standard output.")
]


def status(job: JobArgument, json: Json = False) -> None:
    """Show one job: its state, its counts, and why it waits if it does."""
    client = open_client()
    try:
        view = client.ledger.view(job)
    except UsageError as error:
        if is_lost(job, client.settings.storage_url, client.stores):
            error.hint = "Storage has it, so Redis has lost its data: `pagemill recover` enters it again."
        raise
    print_json(view.as_dict()) if json else print_job(view)


def list_jobs(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 20,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    ledger = open_client().ledger
    views: list[JobView] = []
    for job_id in ledger.job_ids(limit):
        try:
            views.append(ledger.view(job_id))
        except (UsageError, UnreadableJob) as error:
            # One that was removed meanwhile, or that a newer version has submitted, hides none of the others.
            stderr.print(f"[yellow]left out:[/] {job_id}: {escape(error.message)}")
    print_json([view.as_dict() for view in views]) if json else print_jobs(views)


def watch(job: JobArgument, json: Json = False) -> None:
    """Follow a job until it has ended; the exit code is the job's."""
    client = open_client()
    view = follow(job, client.ledger, quiet=json)
    print_json(view.as_dict()) if json else print_job(view)
    raise typer.Exit(exit_code(view))


def results(
    job: JobArgument,
    output: To = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print rows as they are finished, in order, until the job ends.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the output of a job that has ended as JSON lines, or copy it. With --json: where it is, not what it says.

    A copy has the output's own form, or is of JSON lines if its name says so: `-o copy.jsonl` of a Parquet output.

    With --follow the rows are printed as their shards are finished, one JSON line each, whatever the output's form and
    with or without --json; the exit code is the job's.
    """
    client = open_client()
    if follow:
        if output is not None:
            raise UsageError("--follow writes to standard output.", hint="Redirect it: > FILE.")
        raise typer.Exit(_follow_rows(client, job))
    view = client.ledger.view(job)
    if view.state not in ("completed", "cancelled", "expired"):
        hint = f"`pagemill errors {job}` says why." if view.terminal else f"`pagemill watch {job}` waits for it."
        raise UsageError(f"The job is {view.state}: it has no output file.", hint=hint)
    form = client.ledger.spec(job).output
    _deliver(client, form, view.output_url, output, json)
    if view.failed and not json:
        stderr.print(f"{view.failed:,} of {view.rows:,} rows failed: `pagemill errors {job}` says why.")


def errors(job: JobArgument, output: To = None, json: Json = False) -> None:
    """Print the error file of a job, or copy it: the rows that failed, and why."""
    client = open_client()
    view = client.ledger.view(job)
    if view.error_url is None:
        if json:
            print_json({"url": None, "errors": [error.model_dump(exclude_none=True) for error in view.errors]})
        else:
            for error in view.errors:
                typer.echo(error.model_dump_json(exclude_none=True))
        return
    _deliver(client, Output(), view.error_url, output, json)


def _follow_rows(client: Client, job: str) -> int:
    spec = client.ledger.spec(job)
    try:
        with News(client.ledger, job) as news:
            for lines in follow_results(spec, client.ledger, client.stores, news.wait):
                sys.stdout.buffer.write(lines)
                sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Whoever reads has enough. Python would complain once more when it closes the stream at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    view = client.ledger.view(job)
    if view.state == "failed":
        print_errors(view)
    return exit_code(view)


def _deliver(client: Client, form: Output, url: str, target: str | None, json: bool) -> None:
    if target is not None:
        copy_output(form, url, target, client.stores)
        return
    files = output_files(form, url, client.stores)
    if json:
        print_json({"url": url, "size": sum(info.size for info in files)})
        return
    for info in files:
        for piece in json_lines(info, form, client.stores):
            sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
