"""Connecting to the ledger's server."""

import time

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from jobs.errors import LedgerFull, PagemillError, ServiceUnreachable, UsageError
from jobs.settings import mask

_PAUSE_S = 1.0
_FREE = "Raise its maxmemory, or remove old jobs: `pagemill gc --jobs-older-than 7d`."
_RIGHTS = "pagemill needs all commands on the keys and channels pm:*."


def connect(url: str) -> redis.Redis:
    """A client of the ledger's server that has answered once.

    Raises ServiceUnreachable with the address, and UsageError for a URL that is none or a server that is a cluster.
    """
    try:
        client = redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=10,
            socket_connect_timeout=5,
            health_check_interval=25,
            retry=Retry(ExponentialWithJitterBackoff(base=0.1, cap=2), 6),
            client_name="pagemill-ledger",
        )
        probe = redis.Redis.from_url(
            url, socket_connect_timeout=5, socket_timeout=5, retry=Retry(ExponentialWithJitterBackoff(), 0)
        )
        server = probe.info("server")
        probe.close()
    except ValueError as error:
        raise UsageError(
            f"{mask(url)!r} is no Redis URL: {error}", hint="Use redis://host:port/db or unix:///path."
        ) from error
    except redis.AuthenticationError as error:
        raise ServiceUnreachable(
            f"Redis at {mask(url)} refuses the credentials: {error}",
            hint="Check the user and password in PAGEMILL_REDIS_URL.",
        ) from error
    except redis.RedisError as error:
        raise unusable(url, error) from error
    # Redis and Valkey call it by different names.
    if "cluster" in (server.get("redis_mode"), server.get("server_mode")):
        raise UsageError(
            f"{mask(url)} is a Redis Cluster, which Celery cannot use as a broker.",
            hint="Use a single server or Sentinel.",
        )
    return client


class Patience:
    """How long a command that waits for a job bears with a server that does not answer: the job goes on meanwhile."""

    def __init__(self, seconds: float = 600) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def answered(self) -> None:
        self._since = None

    def bear(self, error: redis.RedisError) -> None:
        """Returns after a while, so that the server can be asked again. Raises `error` where it lasts too long."""
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since >= self._seconds:
            raise error
        time.sleep(_PAUSE_S)


UNANSWERED = (redis.ConnectionError, redis.TimeoutError)
"""What is raised where a server cannot be reached, or is starting; it may be there again in a minute."""


def unusable(url: str, error: redis.RedisError) -> PagemillError:
    """The error that says why the ledger's server does not do what it was asked, and what to do about it."""
    where = f"Redis at {mask(url)}"
    match error:
        case redis.OutOfMemoryError():
            return LedgerFull(f"{where} is full: it takes nothing more.", hint=f"{_FREE} What runs goes on then.")
        case redis.ReadOnlyError():
            return ServiceUnreachable(
                f"{where} is a read-only replica.",
                hint="After a failover this passes; else PAGEMILL_REDIS_URL names the wrong server.",
            )
        case redis.BusyLoadingError():
            return ServiceUnreachable(f"{where} is loading its data.", hint="Try again when it has.")
        case redis.exceptions.NoPermissionError():
            return ServiceUnreachable(f"{where} does not let this user do that: {error}", hint=_RIGHTS)
        case redis.ResponseError():
            # Such as MISCONF, where it cannot write its own files, and NOREPLICAS.
            return ServiceUnreachable(f"{where} refuses: {error}", hint="Its own log says more.")
    local = url.startswith("unix://")
    hint = (
        "Start it with `pagemill up`, or set PAGEMILL_REDIS_URL."
        if local
        else "Is it running, and PAGEMILL_REDIS_URL right?"
    )
    return ServiceUnreachable(f"{where} does not answer: {error}", hint=hint)
