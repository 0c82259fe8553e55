"""The command `pagemill`: one file a group of commands, and one place where errors become words and exit codes."""

import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, cast

import typer
from redis.exceptions import RedisError
from rich.console import Console

from jobs.cli.doctor import doctor
from jobs.cli.gc import gc
from jobs.cli.inspect import errors, list_jobs, results, status, watch
from jobs.cli.recover import recover
from jobs.cli.report import report
from jobs.cli.run import run
from jobs.cli.run_batch import FOREIGN_FLAGS, run_batch
from jobs.cli.services import up
from jobs.cli.steer import cancel, pause, resume, retry, set_terms
from jobs.cli.submit import submit
from jobs.connection import unusable
from jobs.errors import PagemillError, UsageError
from jobs.settings import settings

EXIT_INTERRUPTED = 130

# Typer names no more of its errors than this child of the class of all errors of a command line.
_BadCommandLine = cast(type[Exception], typer.BadParameter.__bases__[0])

_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Jobs": {
        "run": run,
        "run-batch": run_batch,
        "submit": submit,
        "status": status,
        "list": list_jobs,
        "watch": watch,
        "pause": pause,
        "resume": resume,
        "cancel": cancel,
        "set": set_terms,
        "retry": retry,
        "results": results,
        "errors": errors,
        "report": report,
    },
    "Services": {"up": up},
    "Operations": {"doctor": doctor, "recover": recover, "gc": gc},
}

_PLUGIN_PANELS = {"estimate": "Jobs", "bench": "Operations"}
_CONTEXTS = {"run-batch": FOREIGN_FLAGS}
_OF_MODELS = frozenset(
    {"gguf", "huggingface_hub", "llguidance", "numpy", "psutil", "safetensors", "tokenizers", "torch", "transformers"}
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("pagemill"))
        raise typer.Exit


def _make_app() -> typer.Typer:
    app = typer.Typer(
        name="pagemill",
        help="A file of prompts in, a file of answers out, every row exactly once.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        pass

    for panel, commands in _GROUPS.items():
        for name, command in commands.items():
            app.command(name, rich_help_panel=panel, context_settings=_CONTEXTS.get(name))(command)
    # Commands that run models come from the workers' room by entry point: this room does not import it.
    for plugin in entry_points(group="pagemill.commands"):
        _add_plugin(app, plugin)
    return app


def _add_plugin(app: typer.Typer, plugin: EntryPoint) -> None:
    """Add a command of another room, or, where what that needs is not installed, one that says so."""
    panel = _PLUGIN_PANELS.get(plugin.name, "Services")
    try:
        command = plugin.load()
    except ModuleNotFoundError as error:
        missing = error.name

        def unavailable() -> None:
            raise _not_installed(f"`pagemill {plugin.name}`", missing)

        everything = {"ignore_unknown_options": True, "allow_extra_args": True}
        text = "Not installed here: pip install 'pagemill[worker]'."
        app.command(plugin.name, rich_help_panel=panel, help=text, context_settings=everything)(unavailable)
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=plugin.name, rich_help_panel=panel)
    else:
        app.command(plugin.name, rich_help_panel=panel)(command)


def main() -> None:
    """The console script."""
    try:
        # Left to itself, typer draws a box around what is wrong with a command line; programs want JSON.
        sys.exit(_make_app()(standalone_mode="--json" not in sys.argv))
    except _BadCommandLine as error:
        _report(UsageError(cast(Any, error).format_message()))
    except PagemillError as error:
        _report(error)
    except RedisError as error:
        _report(unusable(settings().ledger_url, error))
    except ModuleNotFoundError as error:
        # What runs models is imported when it is used.
        if error.name not in _OF_MODELS:
            raise
        _report(_not_installed("This", error.name))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _not_installed(what: str, module: str | None) -> UsageError:
    return UsageError(f"{what} needs {module}, which is not installed here.", hint="pip install 'pagemill[worker]'")


def _report(error: PagemillError) -> None:
    if "--json" in sys.argv:
        typer.echo(json.dumps({"error": error.as_dict()}), err=True)
    else:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]error:[/] {_plain(error.message)}")
        if error.hint:
            console.print(f"[bold]hint:[/] {_plain(error.hint)}")
    sys.exit(error.exit_code)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
