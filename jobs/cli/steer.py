"""Holding, stopping and repeating jobs."""

import time
from typing import Annotated, Literal

import typer

from jobs import orders
from jobs.cli.client import Client, open_client
from jobs.cli.inspect import JobArgument
from jobs.cli.options import Json
from jobs.cli.show import exit_code, follow, print_job, print_json, state_of, terms_of
from jobs.cli.terms import Expires, checked_terms, deadline
from jobs.control import FIRST_TOKENS
from jobs.errors import UsageError
from jobs.retry import retry_spec
from jobs.submit import enter


def cancel(job: JobArgument, json: Json = False) -> None:
    """Stop a job. Its finished shards are kept, and a file of the rest is left to submit again."""
    client = open_client()
    _check(orders.cancel(job, client.ledger, client.stores), "cancel", code="not_cancellable")
    client.tokens.assemble(job)
    _say(client, job, json)


def pause(job: JobArgument, json: Json = False) -> None:
    """Hold a job. Shards in work are finished, and no more are begun until `resume`."""
    client = open_client()
    _check(orders.pause(job, client.ledger, client.stores), "pause", code="not_pausable")
    _say(client, job, json)


def resume(job: JobArgument, json: Json = False) -> None:
    """Go on with a paused job."""
    client = open_client()
    _check(orders.resume(job, client.ledger, client.stores), "resume", code="not_resumable")
    view = client.ledger.view(job)
    waiting = (view.shards or 0) - view.settled - view.leased
    client.tokens.work(view.model, min(waiting, FIRST_TOKENS))
    _say(client, job, json)


def set_terms(
    job: JobArgument,
    priority: Annotated[int | None, typer.Option(help="Jobs of a higher one go first; -1000 to 1000.")] = None,
    weight: Annotated[
        float | None, typer.Option(help="The job's share among its tenant's of the same priority.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="End the job then: a duration from now (90m, 1d12h), a time, or 'never'."),
    ] = None,
    json: Json = False,
) -> None:
    """Change how a job runs beside others. Shards in work are finished as they are."""
    if priority is None and weight is None and expires is None:
        raise UsageError("Say what to change: --priority, --weight or --expires.")
    given = {"priority": priority, "weight": weight}
    checked_terms(**{name: value for name, value in given.items() if value is not None})
    expires_at: int | Literal["never"] | None = None
    if expires is not None:
        expires_at = "never" if expires == "never" else deadline(expires, time.time())
    client = open_client()
    reply = orders.set_terms(job, client.ledger, client.stores, priority=priority, weight=weight, expires_at=expires_at)
    _check(reply, "change", code="not_changeable")
    view = client.ledger.view(job)
    print_json(view.as_dict()) if json else typer.echo(f"{state_of(view)}: {terms_of(view)}")


def retry(
    job: JobArgument,
    failed: Annotated[bool, typer.Option("--failed", help="The rows that failed or were never run.")] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Path or URL of the new result. Default: beside the new job."),
    ] = None,
    max_row_seconds: Annotated[
        float | None, typer.Option(help="In place of the job's own limit, which may be why rows failed.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="In place of the job's own.")] = None,
    expires: Expires = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the new job has ended.")] = False,
    json: Json = False,
) -> None:
    """Run a job's failed rows again, in a new job whose result has all rows: the other answers are kept."""
    if not failed:
        raise UsageError("Say which rows: --failed.", hint="To run all rows again, submit the input again.")
    client = open_client()
    parent, view = client.ledger.spec(job), client.ledger.view(job)
    given = {"max_row_seconds": max_row_seconds, "priority": priority}
    changes = {name: value for name, value in given.items() if value is not None}
    own = {"expires_at": None if expires is None else deadline(expires, time.time())}
    terms = checked_terms(**{**parent.terms.model_dump(), **changes, **own})
    spec = retry_spec(parent, view, output, terms, client.stores)
    enter(spec, client.ledger, client.stores, client.tokens)
    if not wait:
        print_json(client.ledger.view(spec.id).as_dict()) if json else typer.echo(spec.id)
        return
    ended = follow(spec.id, client.ledger, quiet=json)
    print_json(ended.as_dict()) if json else print_job(ended)
    raise typer.Exit(exit_code(ended))


def _check(reply: str, verb: str, code: str) -> None:
    if reply != "ok":
        raise UsageError(f"The job is {reply}: there is nothing to {verb}.", code=code)


def _say(client: Client, job: str, json: bool) -> None:
    view = client.ledger.view(job)
    print_json(view.as_dict()) if json else typer.echo(state_of(view))
