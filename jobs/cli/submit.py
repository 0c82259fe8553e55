"""`pagemill submit`."""

from typing import Annotated

import typer
from rich.markup import escape

from jobs.cli.client import open_client
from jobs.cli.options import INPUT_HELP, OUTPUT_HELP, AsFormat, JobOptions, Json, Model, with_groups
from jobs.cli.show import exit_code, follow, print_job, print_json, stderr
from jobs.cli.terms import QueueOptions, RowTermOptions
from jobs.submit import enter, first_error, prepare


@with_groups
def submit(
    source: Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUT_HELP)],
    model: Model,
    job: JobOptions,
    row_terms: RowTermOptions,
    queue: QueueOptions,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help=OUTPUT_HELP + " Default: beside the job.")
    ] = None,
    output_format: AsFormat = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    json: Json = False,
) -> None:
    """Enqueue a job and print its id."""
    client = open_client()
    spec = prepare(
        source,
        model=model,
        stores=client.stores,
        settings=client.settings,
        rows=job.rows,
        input_options=job.input_options,
        max_line_bytes=job.max_line_bytes,
        sampling=job.sampling,
        pooling=job.embedding,
        output=output,
        output_format=output_format,
        on_bad_row=job.on_bad_row,
        model_aliases=tuple(job.model_alias or ()),
        lora=job.lora,
        terms=queue.terms(row_terms),
        idempotency_key=queue.idempotency_key,
    )
    spec = enter(spec, client.ledger, client.stores, client.tokens)
    if not wait:
        print_json(client.ledger.view(spec.id).as_dict()) if json else typer.echo(spec.id)
        if not any(worker.model == model for worker in client.ledger.workers()):
            stderr.print(f"No live worker serves {model!r} yet: the job waits for one.")
        if not json and (error := first_error(spec, client.stores)) is not None:
            stderr.print(f"[yellow]The first rows are all bad:[/] line {error.line}: {escape(error.message)}")
        return
    view = follow(spec.id, client.ledger, quiet=json)
    print_json(view.as_dict()) if json else print_job(view)
    raise typer.Exit(exit_code(view))
