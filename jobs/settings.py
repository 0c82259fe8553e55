"""Where the services are and how patient to be with them.

In rising order: these defaults, `pagemill.toml`, the environment (`PAGEMILL_*`), flags.
"""

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from jobs.errors import UsageError
from jobs.layout import absolute_url

_MAX_SOCKET_PATH = 100


def _resolved(path: Path) -> Path:
    return path.expanduser().resolve()


def _default_state_dir() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(root) / "pagemill"


class Settings(BaseSettings):
    """All of pagemill's settings. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="PAGEMILL_", toml_file="pagemill.toml", frozen=True, extra="forbid")

    state_dir: Annotated[Path, AfterValidator(_resolved)] = Field(
        default_factory=_default_state_dir, validate_default=True
    )
    """Where `pagemill up` keeps its Valkey data, its socket and its file store."""
    redis_url: str = ""
    """Empty: the Valkey that `pagemill up` runs in `state_dir`."""
    storage: str = ""
    """URL of the folder or bucket prefix for job files and segments. Empty: `store/` in `state_dir`."""

    s3_endpoint_url: str | None = None
    s3_region: str | None = None
    s3_access_key_id: str | None = None
    s3_secret_access_key: SecretStr | None = None

    lease_ttl: Annotated[float, Field(gt=0)] = 30
    """How long a shard stays with a worker that has stopped beating. A beat comes every two seconds."""
    tenant_weights: dict[str, Annotated[float, Field(ge=1e-3, le=1e3)]] = Field(default_factory=dict)
    """How the tenants' jobs of one priority share a model's workers; a tenant that is not listed has the weight 1."""
    priority_patience: Annotated[float, Field(gt=0)] = 600
    """After so long without a shard, a lower priority comes before higher ones, at every fourth turn at most."""
    sweep_every: Annotated[float, Field(gt=0)] = 10
    stop_grace: Annotated[float, Field(gt=0)] = 30
    """How long a worker may take to stop after SIGTERM before it ends itself."""
    min_shard_tokens: Annotated[int, Field(ge=1)] = 32_768
    """A shard is cut when its prompts and answers are estimated at this many tokens; later ones of a large input at
    twice as many, and so on."""
    max_shard_rows: Annotated[int, Field(ge=1)] = 1_000
    """And when it has this many rows, or twice as many, and so on."""
    shard_order: Literal["prefix", "file"] = "prefix"
    """Which shards are worked on first: those whose prompts begin alike one after the other, or as they are in the
    file. The output is in the order of the file either way."""
    max_copy_bytes: Annotated[int, Field(ge=1)] = 256 << 30
    """The planner writes compressed files, CSV and TSV to storage as JSON lines: those of one job up to this many."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def valkey_socket(self) -> Path:
        path = self.state_dir / "valkey.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            return path
        name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"pagemill-{os.getuid()}-{name}.sock"

    @property
    def ledger_url(self) -> str:
        """The Redis URL in redis-py's spelling."""
        return self.redis_url or f"unix://{self.valkey_socket}?db=0"

    @property
    def broker_url(self) -> str:
        """The same server in kombu's spelling, which names a UNIX socket differently."""
        url = self.ledger_url
        if not url.startswith("unix://"):
            return url
        parts = urlsplit(url)
        db = next((v for k, _, v in (p.partition("=") for p in parts.query.split("&")) if k == "db"), "0")
        credentials = parts.netloc if "@" in parts.netloc else ""
        return f"redis+socket://{credentials}{parts.path}?virtual_host={db or 0}"

    @property
    def storage_url(self) -> str:
        return absolute_url(self.storage or str(self.state_dir / "store")).rstrip("/")


def mask(url: str) -> str:
    """The URL without its password, fit for logs and error messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


@cache
def settings() -> Settings:
    """The settings of this process, read once. Raises UsageError naming the setting, or the file that is not TOML."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UsageError(
            f"The setting {name} is wrong: {first['msg']}.",
            code="invalid_setting",
            hint=f"Check PAGEMILL_{name.upper()} and {name} in pagemill.toml.",
        ) from error
    except TOMLDecodeError as error:
        raise UsageError(f"pagemill.toml is not TOML: {error}", code="invalid_setting") from error
