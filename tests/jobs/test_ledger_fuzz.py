"""Workers at once on one ledger, that crash, stall, give back and repeat themselves; the job is held, and moved between
priorities, now and then."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest

from jobs.ledger import Ledger
from jobs.records import SegmentRecord
from jobs.spec import JobSpec
from tests.jobs.ledgers import LossyRedis, key, new_spec, opened, record_of
from tests.servers import ValkeyServer

SHARDS, WORKERS = 80, 8
TTL = 0.15
PAUSE = 1.6 * TTL
"""Longer than a lease lasts, as a garbage collection or a laptop's lid may take."""


class Crash(Exception):
    """The process is gone, with whatever it held."""


@dataclass
class Store:
    """Objects by URL; an attempt's key that is used twice is the end of the test."""

    objects: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, url: str, body: str) -> None:
        with self.lock:
            assert url not in self.objects, "the key of an attempt was used again"
            self.objects[url] = body


class Worker:
    """Does what a slot does, until the job is no longer worked on."""

    def __init__(self, spec: JobSpec, url: str, store: Store, seed: str) -> None:
        self.spec = spec
        self.client = LossyRedis.from_url(url, decode_responses=True)
        self.ledger = Ledger(self.client)
        self.store = store
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.idle = threading.Event()

    def run(self) -> None:
        while self.ledger.state(self.spec.id) == "in_progress":
            try:
                self.attempt()
            except Crash:
                self.seen["crash"] += 1
        self.client.close()

    def attempt(self) -> None:
        attempt = f"{self.random.getrandbits(128):032x}"
        lease = self.ledger.lease(self.spec.model, attempt, TTL)
        if lease is None:
            self.idle.wait(TTL / 5)
            return
        self.trouble()
        for rows in range(3):
            if self.ledger.beat([(lease, rows)], TTL) != ["ok"]:
                self.seen["lost"] += 1
                return
            self.trouble()
        if self.random.random() < 0.05:
            self.seen["given back"] += 1
            self.ledger.give_back(lease)
            return
        self.store.put(self.spec.layout.segment(lease.shard.index, lease.fence, attempt), attempt)
        self.trouble()
        self.seen[f"commit {self.ledger.commit(lease, record_of(lease))}"] += 1
        self.trouble()

    def trouble(self) -> None:
        self.client.lossy = self.random.random() < 0.1
        dice = self.random.random()
        if dice < 0.03:
            raise Crash
        if dice < 0.06:
            self.idle.wait(PAUSE)


@pytest.mark.parametrize("seed", [1, 2])
def test_workers_that_crash_stall_and_repeat_themselves_settle_each_shard_once(seed: int, valkey: ValkeyServer) -> None:
    ledger, store = Ledger(valkey.client), Store()
    spec = opened(ledger, SHARDS, new_spec(max_tries=1000))
    workers = [Worker(spec, valkey.url, store, f"{seed}-{n}") for n in range(WORKERS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    dice = random.Random(seed)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ledger.expire(spec.id)
        ledger.pause(spec.id)
        ledger.set_terms(spec.id, priority=dice.randint(-2, 2), weight=dice.choice([0.5, 1.0, 2.0]))
        threads[0].join(TTL / 10)
        ledger.resume(spec.id)
        ledger.set_terms(spec.id, priority=dice.randint(-2, 2))
        threads[0].join(TTL / 2)

    seen = sum((worker.seen for worker in workers), Counter[str]())
    assert all((seen["crash"], seen["given back"], seen["lost"] + seen["commit superseded"] + seen["commit lost"])), (
        seen
    )
    assert ledger.state(spec.id) == "finalizing"
    records = ledger.records(spec.id)
    assert sorted(records) == list(range(SHARDS))
    assert len({record.fence for record in records.values() if isinstance(record, SegmentRecord)}) == SHARDS
    for shard, record in records.items():
        assert isinstance(record, SegmentRecord)
        assert store.objects[spec.layout.segment(shard, record.fence, record.attempt)] == record.attempt
    view = ledger.view(spec.id)
    assert (view.settled, view.done, view.failed) == (SHARDS, 9 * SHARDS, SHARDS)
    for name in ("ready", "leases", "own", "progress"):
        assert not ledger.client.exists(key(spec.id, name))
