"""Commands as the console script runs them, in the test's own process."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs import cli, settings
from tests.jobs.site import Site
from tests.servers import ValkeyServer


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, str]:
        """What was said on stderr with --json: one object, and nothing else."""
        assert self.out == ""
        return json.loads(self.err)["error"]


Command = Callable[..., Done]


def commands(
    site: Site, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Command]:
    """The body of a fixture that runs commands; keyword arguments are settings in their environment."""

    def run(*arguments: str | Path, **environment: str) -> Done:
        services = {**valkey.environment(), "PAGEMILL_STORAGE": site.settings.storage_url}
        with monkeypatch.context() as patch:
            for name, value in {**services, **environment}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["pagemill", *map(str, arguments)])
            settings.settings.cache_clear()
            capfdbinary.readouterr()
            with pytest.raises(SystemExit) as caught:
                cli.main()
        out, err = capfdbinary.readouterr()
        return Done(int(caught.value.code or 0), out.decode(), err.decode())

    yield run
    settings.settings.cache_clear()
