"""The command `pagemill worker`."""

from typing import Annotated

import typer

from engine.config import EngineConfig
from engine.errors import EngineError
from jobs.cli.logs import log_to_stderr
from jobs.cli.options import EngineOptions, JsonLogs, with_groups
from jobs.errors import UsageError
from jobs.settings import settings


@with_groups
def worker(
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="'demo', a folder, a .gguf file or a hub id.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that jobs ask for, if it is not --model.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Shards in work at once. Default: as many as the engine has room for.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Plan, assemble and sweep instead of running a model; needs no torch.")
    ] = False,
    json: JsonLogs = False,
) -> None:
    """Run a worker: one for each GPU (--model), and at least one to plan and assemble (--control)."""
    from workers.app import serve_control, serve_model

    log_to_stderr(as_json=json)
    if control and model is not None:
        raise UsageError("--model and --control exclude each other.", hint="Run two workers, one of each kind.")
    if not control and model is None:
        raise UsageError("A worker needs --model NAME, or --control.")
    if model is None:
        raise typer.Exit(serve_control(settings()))
    try:
        config = EngineConfig(model, **engine.given)
        code = serve_model(settings(), config, served_name=served_model_name or model, slots=slots)
    except EngineError as error:
        raise UsageError(error.message, hint=error.hint, code=error.code) from error
    raise typer.Exit(code)
