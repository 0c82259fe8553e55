"""How a job runs beside others, as options of a command."""

import time
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer
from pydantic import ValidationError

from jobs.cli.durations import seconds
from jobs.errors import UsageError
from jobs.spec import DEFAULT_TENANT, Dedupe, Terms

_QUEUE, _ROWS = "Beside other jobs", "Rows"

Expires = Annotated[
    str | None,
    typer.Option(
        help="End the job then with what is done: a duration (90m, 1d12h) or a time (2030-01-31T06:00).",
        rich_help_panel=_QUEUE,
    ),
]


@dataclass(frozen=True, slots=True)
class RowTermOptions:
    """What is done with rows that are slow or alike."""

    max_row_seconds: Annotated[
        float | None,
        typer.Option(
            help="A row that the engine has worked on for so long is the error row_timeout.", rich_help_panel=_ROWS
        ),
    ] = None
    dedupe: Annotated[
        Dedupe,
        typer.Option(
            help="Each worker asks identical rows of a job once. 'exact': those that are greedy, seeded or embedded, "
            "so that no answer changes. 'all': sampled ones too, and they share one answer.",
            rich_help_panel=_ROWS,
        ),
    ] = "off"

    @property
    def terms(self) -> Terms:
        return checked_terms(max_row_seconds=self.max_row_seconds, dedupe=self.dedupe)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Where the job stands among others, and until when."""

    tenant: Annotated[
        str,
        typer.Option(help="On whose behalf: tenants share workers by their weights.", rich_help_panel=_QUEUE),
    ] = DEFAULT_TENANT
    priority: Annotated[
        int, typer.Option(help="Jobs of a higher one go first; -1000 to 1000.", rich_help_panel=_QUEUE)
    ] = 0
    weight: Annotated[
        float, typer.Option(help="The job's share among its tenant's of the same priority.", rich_help_panel=_QUEUE)
    ] = 1.0
    expires: Expires = None
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="Submitting again under the same key gives the same job.", rich_help_panel=_QUEUE),
    ] = None

    def terms(self, rows: RowTermOptions) -> Terms:
        """Raises UsageError for a value out of range and for a deadline that has passed."""
        return checked_terms(
            tenant=self.tenant,
            priority=self.priority,
            weight=self.weight,
            expires_at=None if self.expires is None else deadline(self.expires, time.time()),
            **rows.terms.model_dump(include={"max_row_seconds", "dedupe"}),
        )


def deadline(text: str, now: float) -> int:
    """The Unix second that a duration from now, or a time in ISO 8601, means. A time without a zone is local.

    Raises UsageError for what is neither, and for a time that is not to come.
    """
    if (length := seconds(text)) is not None:
        at = now + length
    else:
        try:
            at = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError) as error:
            raise UsageError(
                f"--expires: {text!r} is neither a duration nor a time.",
                hint="Examples: 90m, 1d12h, 2030-01-31T06:00, 2030-01-31T06:00Z.",
            ) from error
    if at <= now:
        raise UsageError(f"--expires: {text} is not in the future.")
    return int(at)


def checked_terms(**values: object) -> Terms:
    """Raises UsageError that names the option whose value is out of range."""
    try:
        return Terms.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from error
