"""`pagemill run`: the main job with nothing set up.

Everything it needs lives in one folder beside the output, which is removed when the job is done. A run that was stopped
is taken up by giving the same command again: what was committed is not computed twice.
"""

import json as json_module
import shutil
import signal
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from jobs.cli.client import Client, open_client
from jobs.cli.options import INPUT_HELP, OUTPUT_HELP, AsFormat, EngineOptions, JobOptions, Json, Model, with_groups
from jobs.cli.services import children
from jobs.cli.show import exit_code, follow, print_errors, print_json, stderr, stdout
from jobs.cli.terms import RowTermOptions
from jobs.errors import PagemillError, UsageError
from jobs.formats.jsonl import iter_lines
from jobs.local.alone import alone_in
from jobs.local.supervisor import Supervisor
from jobs.local.valkey import valkey_child
from jobs.output import Output, OutputFormat
from jobs.reading import json_lines, output_files
from jobs.records import JobView
from jobs.settings import Settings, settings
from jobs.spec import MAX_LINE_BYTES, JobSpec, load_spec
from jobs.storage import Stores
from jobs.submit import enter, prepare

_SPEC = "run.json"


@with_groups
def run(
    source: Annotated[list[str], typer.Argument(metavar="INPUT...", help=INPUT_HELP)],
    output: Annotated[str, typer.Option("--output", "-o", help=OUTPUT_HELP)],
    model: Model,
    job: JobOptions,
    row_terms: RowTermOptions,
    engine: EngineOptions,
    output_format: AsFormat = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over instead of taking up a run that was stopped.")
    ] = False,
    show: Annotated[int, typer.Option(min=0, help="Print so many answers at the end.")] = 0,
    json: Json = False,
) -> None:
    """Run one job here and now: a private Valkey, one worker, a progress bar; cleaned up at the end."""
    folder = state_folder(output)
    config = settings().model_copy(update={"state_dir": folder, "redis_url": "", "storage": ""})
    with alone_in(folder, fresh=fresh):
        spec = _spec(source, output, output_format, model, job, row_terms, config)
        view, client = run_here(spec, config, engine, quiet=json)
        if view.state in ("completed", "failed"):
            shutil.rmtree(folder)
    _report(view, spec.output, client.stores, show, json)
    raise typer.Exit(exit_code(view))


def run_here(spec: JobSpec, config: Settings, engine: EngineOptions, *, quiet: bool) -> tuple[JobView, Client]:
    """Run a job to its end with services of its own in `config.state_dir`, which is left as it is then.

    Of a run that could not start, nothing is left.
    """
    folder = config.state_dir
    signal.signal(signal.SIGTERM, _interrupt)
    with Supervisor(folder / "log", grace=config.stop_grace) as supervisor:
        supervisor.start(valkey_child(config))
        client = open_client(config)
        enter(spec, client.ledger, client.stores, client.tokens)
        for child in children(config, spec.model, engine):
            supervisor.start(child)
        try:
            view = follow(
                spec.id, client.ledger, quiet=quiet, own_worker=True, check=lambda: _raise_failure(supervisor)
            )
        except KeyboardInterrupt:
            stderr.print(f"Stopped. The same command takes the run up again; {folder} has what is done.")
            raise
        except PagemillError:
            # What cannot start leaves nothing to take up, and must not stand in the way of the corrected command.
            nothing_done = not client.ledger.view(spec.id).settled
            supervisor.stop()
            if nothing_done:
                shutil.rmtree(folder)
            raise
    return view, client


def state_folder(output: str) -> Path:
    """Beside a local output; in the working folder for one in a bucket."""
    local = (
        Path(output.removeprefix("file://")) if "s3://" not in output else Path(output.rstrip("/").rsplit("/", 1)[-1])
    )
    return local.expanduser().resolve().with_name(f"{local.name}.pagemill")


def _spec(
    source: list[str],
    output: str,
    output_format: OutputFormat | None,
    model: str,
    job: JobOptions,
    row_terms: RowTermOptions,
    config: Settings,
) -> JobSpec:
    """The spec of this run: a new one, or that of the stopped run that it takes up."""
    path = config.state_dir / _SPEC
    spec = prepare(
        source,
        model=model,
        stores=Stores(config),
        settings=config,
        rows=job.rows,
        input_options=job.input_options,
        max_line_bytes=job.max_line_bytes,
        sampling=job.sampling,
        pooling=job.embedding,
        output=output,
        output_format=output_format,
        taken_up=path.exists(),
        on_bad_row=job.on_bad_row,
        model_aliases=tuple(job.model_alias or ()),
        lora=job.lora,
        terms=row_terms.terms,
    )
    return taken_up(spec, config)


def taken_up(spec: JobSpec, config: Settings) -> JobSpec:
    """The stopped run in the state folder, if it is one of the same job; else this one, which is now the run there."""
    path = config.state_dir / _SPEC
    if path.exists():
        stopped = load_spec(path.read_bytes(), str(path))
        if stopped.fingerprint == spec.fingerprint:
            stderr.print(f"Taking up the run that was stopped ({stopped.id}).")
            return stopped
        raise UsageError(
            f"{config.state_dir} holds a stopped run with another input or other options.",
            code="other_run",
            hint="Give the command of that run again, or --fresh to start over.",
        )
    Stores(config).put(str(path), spec.model_dump_json().encode())
    return spec


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _raise_failure(supervisor: Supervisor) -> None:
    if supervisor.failed.is_set() and supervisor.failure is not None:
        raise supervisor.failure


def _report(view: JobView, form: Output, stores: Stores, show: int, json: bool) -> None:
    if json:
        print_json(view.as_dict())
        return
    if view.state == "completed" and show:
        _print_answers(stores, form, view.output_url, show)
    print_errors(view)
    if view.state == "failed":
        stdout.print(f"failed: {view.error_count} error(s); there is no output file")
        return
    seconds = max((view.ended_at or 0) - (view.started_at or 0), 1)
    out = view.usage.completion_tokens
    stdout.print(
        f"{view.state}: {view.done} rows answered, {view.failed} failed; {view.usage.prompt_tokens} tokens in, "
        f"{out} out, {out / seconds:,.0f} tokens/s"
    )
    for name, url in (("output", view.output_url), ("errors", view.error_url)):
        if url:
            stdout.print(f"{name}: {url.removeprefix('file://')}")


def _print_answers(stores: Stores, form: Output, url: str, count: int) -> None:
    pieces = (piece for info in output_files(form, url, stores) for piece in json_lines(info, form, stores))
    for line in islice(iter_lines(pieces, MAX_LINE_BYTES), count):
        row: dict[str, Any] = json_module.loads(line.data or b"{}")
        response = row.get("response")
        answer = response if isinstance(response, str) else json_module.dumps(response)
        question = next((value for value in row.values() if isinstance(value, str)), "")
        stdout.print(f"\n[bold]> {_clip(question)}[/]\n{_clip(answer)}")
    stdout.print()


def _clip(text: str, length: int = 300) -> str:
    text = text if len(text) <= length else f"{text[:length]}..."
    return text.replace("[", r"\[")
