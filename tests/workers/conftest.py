"""A worker without its process: slots, heartbeat, host, ledger and store are real, and the engine is a stub."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.ledger import Ledger
from jobs.retry import KeptAnswers
from jobs.spec import JobSpec
from tests.jobs.ledgers import worker
from tests.jobs.site import Site
from tests.servers import ValkeyServer
from tests.workers.stub_engine import CONFIG, Engines
from workers import attempt as attempt_module
from workers import host as host_module
from workers.context import SlotContext, Stopping
from workers.heartbeat import Heartbeat
from workers.host import EngineHost
from workers.slot import work

TTL = 0.6
WINDOW = 3
WAIT_S = 20


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(host_module, "_MAX_RESTART_DELAY_S", 0.02)
    monkeypatch.setattr(attempt_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(attempt_module, "_MAX_RETRY_S", 0.05)


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def site(valkey: ValkeyServer, tmp_path: Path) -> Site:
    """Jobs on files, in shards of four rows."""
    return Site.of(valkey.settings(storage=f"file://{tmp_path}/store", max_shard_rows=4), Ledger(valkey.client))


@dataclass(frozen=True)
class Bench:
    """A worker's slots, at which the test itself works."""

    site: Site
    context: SlotContext

    def work(self, spec: JobSpec) -> None:
        work(spec.model, self.context)


@pytest.fixture
def bench(site: Site, engines: Engines) -> Iterator[Bench]:
    host = EngineHost(CONFIG, engines)
    host.start()
    heartbeat = Heartbeat(site.ledger, TTL, lambda busy: worker("tiny", busy=busy))
    heartbeat.start()
    context = SlotContext(
        ledger=site.ledger,
        stores=site.stores,
        tokens=site.tokens,
        host=host,
        heartbeat=heartbeat,
        stopping=Stopping(),
        lease_ttl=TTL,
        window=WINDOW,
        at_once=1,
        engine_name="stub",
        worker_id="w",
        kept=KeptAnswers(site.stores),
    )
    yield Bench(site, context)
    heartbeat.stop()
    host.stop()


@contextmanager
def at_work(bench: Bench, spec: JobSpec) -> Iterator[None]:
    """A slot works in a thread of its own; it has ended when the block has, and is told to stop where that failed."""
    slot = threading.Thread(target=bench.work, args=(spec,))
    slot.start()
    try:
        yield
    except BaseException:
        bench.context.stopping.set()
        raise
    finally:
        slot.join(WAIT_S)
    assert not slot.is_alive()
