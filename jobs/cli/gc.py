"""`pagemill gc`: frees what the storage holds for nobody."""

import time
from collections import Counter
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

from jobs.cli.client import open_client
from jobs.cli.durations import seconds
from jobs.cli.options import Json
from jobs.cli.show import print_json, stderr, stdout
from jobs.errors import UsageError
from jobs.gc import Collector, Garbage

_KINDS = {
    "segment": "segments of attempts that are not the result",
    "input": "copies of inputs that were not used",
    "submit": "left by submits that broke off",
    "probe": "left by checks of the storage",
    "write": "unfinished uploads and writes",
    "job": "objects of whole jobs",
}


def gc(
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Leave alone what is younger: 90s, 30m, 24h, 7d.")
    ] = "24h",
    jobs_older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Also remove whole jobs that ended longer ago than this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove what no result refers to: lost segments, unfinished uploads, and old jobs if asked. Live jobs are safe.

    Results that were written elsewhere than below the storage URL are never touched.
    """
    now = time.time()
    before = now - _length(older_than, "--older-than")
    jobs_before = None if jobs_older_than is None else now - _length(jobs_older_than, "--jobs-older-than")
    client = open_client()
    collector = Collector(
        client.settings.storage_url,
        client.ledger,
        client.stores,
        before=before,
        jobs_before=jobs_before,
    )
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    listed: list[Garbage] = []
    for garbage in collector.find() if dry_run else collector.collect():
        count[garbage.kind] += 1
        size[garbage.kind] += garbage.what.size
        if dry_run:
            listed.append(garbage)
    if json:
        items = [{"kind": one.kind, "job": one.job_id, "url": one.what.url, "size": one.what.size} for one in listed]
        totals = {kind: {"count": count[kind], "size": size[kind]} for kind in _KINDS}
        print_json({"removed": not dry_run, "totals": totals, "items": items, "unlisted": collector.unlisted})
        return
    _print(listed, count, size, dry_run)
    if collector.unlisted:
        stderr.print(f"[yellow]unfinished uploads were not looked at:[/] {escape(collector.unlisted)}")


def _length(text: str, option: str) -> int:
    if (length := seconds(text)) is None:
        raise UsageError(f"{option}: {text!r} is no length of time.", hint="Write 90s, 30m, 24h or 7d.")
    return length


def _print(listed: list[Garbage], count: Counter[str], size: Counter[str], dry_run: bool) -> None:
    for garbage in listed:
        stdout.print(f"{garbage.kind:8} {decimal(garbage.what.size):>10}  {escape(garbage.what.url)}")
    if not count:
        stdout.print("There is nothing to remove.")
        return
    table = Table("", Column("objects", justify="right"), Column("size", justify="right"), box=None)
    for kind, words in _KINDS.items():
        if count[kind]:
            table.add_row(words, str(count[kind]), decimal(size[kind]))
    stdout.print(table)
    total = decimal(sum(size.values()))
    stdout.print(f"{total} would be freed." if dry_run else f"{total} freed.")
