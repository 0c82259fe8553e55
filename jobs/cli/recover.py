"""`pagemill recover`: after Redis has lost its data, the ledger is rebuilt from storage."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from jobs.cli.client import open_client
from jobs.cli.options import Json
from jobs.cli.show import print_json, state_of, stderr, stdout
from jobs.control import Control
from jobs.errors import OutputTaken
from jobs.records import JobView
from jobs.recover import Unusable, lost_jobs
from jobs.recover import recover as recover_job


def recover(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the jobs that would be entered.")] = False,
    json: Json = False,
) -> None:
    """Enter the jobs that storage has and Redis has lost. Shards that were finished are not run again.

    May be run at any time and repeatedly, beside workers as well.
    """
    client = open_client()
    control = Control(client.ledger, client.stores, client.tokens, client.settings)
    views: list[JobView] = []
    listed: list[str] = []
    unusable: list[Unusable] = []
    for found in lost_jobs(client.settings.storage_url, client.ledger, client.stores):
        if isinstance(found, Unusable):
            unusable.append(found)
        elif dry_run:
            listed.append(found.id)
        else:
            try:
                views.append(recover_job(found, client.ledger, client.stores, client.tokens, control))
            except OutputTaken as error:
                unusable.append(Unusable(found.id, f"job {found.id}: {error.message}"))
                continue
            listed.append(found.id)
    if json:
        skipped = {one.job_id: one.why for one in unusable}
        print_json({"lost": listed, "recovered": [view.as_dict() for view in views], "skipped": skipped})
        return
    if dry_run:
        stdout.print("\n".join(listed) or "No job is lost.")
    else:
        _print(views)
    for one in unusable:
        stderr.print(f"[yellow]left out:[/] {escape(one.why)}")


def _print(views: list[JobView]) -> None:
    if not views:
        stdout.print("No job is lost: Redis knows all that storage has.")
        return
    table = Table(Column("job", no_wrap=True, overflow="fold"), "state", "shards kept", "rows kept", box=None)
    for view in views:
        shards = f"{view.settled} of {'?' if view.shards is None else view.shards}"
        rows = f"{view.done + view.failed} of {'?' if view.rows is None else view.rows}"
        table.add_row(view.id, state_of(view), shards, rows)
    stdout.print(table)
