"""Whose turn it is: priorities, shares of tenants and jobs, and that nobody waits for ever."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from jobs.ledger import FairShare, Lease, Ledger
from jobs.settings import Settings
from jobs.spec import JobSpec, model_key
from tests.jobs.ledgers import TTL, LossyRedis, new_spec, opened, record_of
from tests.servers import ValkeyServer

GOLD = FairShare({"gold": 3})
IMPATIENT = FairShare(patience=0)
SERVED = f"pm:queue:{model_key('tiny')}:served"


@pytest.fixture
def ledger(valkey: ValkeyServer) -> Ledger:
    return Ledger(valkey.client)


def turns(ledger: Ledger, count: int, share: FairShare = GOLD) -> Iterator[Lease]:
    """So many slots come free, one after the other, and none is done."""
    for n in range(count):
        lease = ledger.lease("tiny", f"attempt-{random.getrandbits(64)}-{n}", TTL, share)
        if lease is None:
            return
        yield lease


def tenants(leases: Iterator[Lease]) -> str:
    """The first letters of the tenants in the order in which they were served."""
    return "".join(lease.spec.tenant[0] for lease in leases)


def jobs(leases: Iterator[Lease]) -> list[str]:
    return [lease.job_id for lease in leases]


# --- many at once -------------------------------------------------------------------------------------------------


@dataclass
class Backlog:
    """What a scheduler without a ledger would know: the shards that each job still has to hand out."""

    ready: dict[str, int] = field(default_factory=dict)
    specs: dict[str, JobSpec] = field(default_factory=dict)

    def highest(self) -> int:
        return max(self.specs[job_id].priority for job_id, count in self.ready.items() if count)

    def tenants(self, priority: int) -> set[str]:
        waiting = [self.specs[job_id] for job_id, count in self.ready.items() if count]
        return {spec.tenant for spec in waiting if spec.priority == priority}


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("lossy", [False, True], ids=["", "replies get lost"])
def test_a_hundred_jobs_at_once_run_by_priority_and_in_their_tenants_shares(
    slots: int, lossy: bool, valkey: ValkeyServer
) -> None:
    """Two tenants of the weights 3 and 1. Whatever the number of slots and however long shards take, neither is ever
    more than a shard ahead of its share while both have work of the highest priority."""
    dice = random.Random(f"{slots}-{lossy}")
    client = LossyRedis.from_url(valkey.url, decode_responses=True)
    ledger, backlog = Ledger(client), Backlog()
    for n in range(100):
        spec = new_spec(tenant=dice.choice(["gold", "base"]), priority=dice.choice([0, 5, 10]), created_at=n)
        size = dice.randint(1, 6)
        opened(ledger, size, spec)
        backlog.ready[spec.id], backlog.specs[spec.id] = size, spec
    client.lossy = lossy
    at_work: list[Lease] = []
    had: Counter[str] = Counter()
    level, served = 10, 0
    while True:
        while len(at_work) < slots and (lease := next(turns(ledger, 1), None)):
            spec = lease.spec
            assert spec.priority == backlog.highest()
            if spec.priority != level or len(backlog.tenants(level)) < 2:
                level, had = spec.priority, Counter()
            if len(backlog.tenants(level)) == 2:
                had[spec.tenant] += 1
                assert abs(had["gold"] / 3 - had["base"]) <= 1 / 3 + 1
            backlog.ready[spec.id] -= 1
            at_work.append(lease)
            served += 1
        if not at_work:
            break
        done = at_work.pop(dice.randrange(len(at_work)))
        assert ledger.commit(done, record_of(done)) == "ok"
    assert set(backlog.ready.values()) == {0}
    assert {ledger.state(job_id) for job_id in backlog.ready} == {"finalizing"}
    assert served > 300
    client.close()


def test_what_a_lease_costs_does_not_grow_with_the_jobs_that_wait(ledger: Ledger) -> None:
    def commands_of_a_lease() -> int:
        ledger.client.config_resetstat()
        assert next(turns(ledger, 1), None) is not None
        return sum(one["calls"] for one in ledger.client.info("commandstats").values())

    for _ in range(3):
        opened(ledger, 5)
    few = commands_of_a_lease()
    for _ in range(300):
        opened(ledger, 2)
    assert commands_of_a_lease() == few


# --- shares -------------------------------------------------------------------------------------------------------


def test_tenants_share_by_weight_from_the_first_shard_on(ledger: Ledger) -> None:
    opened(ledger, 20, new_spec(tenant="gold", created_at=2))
    opened(ledger, 20, new_spec(tenant="base", created_at=1))
    order = tenants(turns(ledger, 12))
    assert order.startswith("bgggb")
    assert Counter(order) == {"g": 9, "b": 3}


def test_a_tenant_with_many_jobs_gets_no_more_than_one_with_a_single_job(ledger: Ledger) -> None:
    for n in range(10):
        opened(ledger, 2, new_spec(tenant="many", created_at=n))
    opened(ledger, 20, new_spec(tenant="single", created_at=99))
    assert tenants(turns(ledger, 10)) == "ms" * 5


def test_the_jobs_of_a_tenant_share_by_weight(ledger: Ledger) -> None:
    heavy = opened(ledger, 20, new_spec(weight=2, created_at=2))
    light = opened(ledger, 20, new_spec(weight=1, created_at=1))
    assert Counter(jobs(turns(ledger, 12))) == {heavy.id: 8, light.id: 4}


def test_who_comes_late_does_not_make_up_for_the_time_before(ledger: Ledger) -> None:
    opened(ledger, 50, new_spec(tenant="early"))
    assert tenants(turns(ledger, 20)) == "e" * 20
    opened(ledger, 50, new_spec(tenant="late"))
    assert Counter(tenants(turns(ledger, 10))) == {"e": 5, "l": 5}
    late = opened(ledger, 50, new_spec(tenant="early"))
    assert Counter(jobs(turns(ledger, 12)))[late.id] == 3


def test_who_has_nothing_ready_for_a_while_comes_back_where_it_was(ledger: Ledger) -> None:
    """A shard that is given back is no reason to be served again before all others."""
    one = opened(ledger, 1, new_spec(tenant="short", created_at=1))
    opened(ledger, 20, new_spec(tenant="other", created_at=2))
    lease = next(turns(ledger, 1))
    assert lease.job_id == one.id
    assert ledger.give_back(lease)
    assert tenants(turns(ledger, 3)) == "oso"


def test_a_model_that_everybody_has_left_starts_anew(ledger: Ledger) -> None:
    opened(ledger, 3, new_spec(tenant="gold"))
    assert len(list(turns(ledger, 9))) == 3
    assert ledger.client.keys("pm:queue:*") == []


def test_weights_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_TENANT_WEIGHTS", '{"gold": 3}')
    monkeypatch.setenv("PAGEMILL_PRIORITY_PATIENCE", "30")
    settings = Settings()
    assert (settings.tenant_weights, settings.priority_patience) == ({"gold": 3}, 30)
    monkeypatch.setenv("PAGEMILL_TENANT_WEIGHTS", '{"gold": 0}')
    with pytest.raises(ValidationError, match="greater than or equal to"):
        Settings()


# --- priorities ---------------------------------------------------------------------------------------------------


def test_a_higher_priority_goes_first_whatever_the_shares(ledger: Ledger) -> None:
    low = opened(ledger, 3, new_spec(tenant="gold", priority=-5, created_at=1))
    middle = opened(ledger, 3, new_spec(tenant="gold", created_at=2))
    high = opened(ledger, 3, new_spec(tenant="base", priority=7, created_at=3))
    assert jobs(turns(ledger, 9)) == [high.id] * 3 + [middle.id] * 3 + [low.id] * 3


def test_a_priority_that_waited_too_long_gets_every_fourth_turn_at_most(ledger: Ledger) -> None:
    low = opened(ledger, 3, new_spec(priority=0))
    high = opened(ledger, 20, new_spec(priority=9))
    assert jobs(turns(ledger, 12, IMPATIENT)) == [*[high.id] * 3, low.id] * 3
    assert jobs(turns(ledger, 20, IMPATIENT)) == [high.id] * 11


def test_of_several_that_waited_too_long_the_one_that_waited_longest_is_served(ledger: Ledger) -> None:
    ids = {priority: opened(ledger, 20, new_spec(priority=priority)).id for priority in (0, 5, 9)}
    ledger.client.zadd(SERVED, {"0": 1000, "5": 2000})
    order = jobs(turns(ledger, 12, IMPATIENT))
    assert [order[n] for n in (3, 7)] == [ids[0], ids[5]]


def test_patience_is_counted_from_the_last_shard(ledger: Ledger) -> None:
    low = opened(ledger, 20, new_spec(priority=0))
    high = opened(ledger, 40, new_spec(priority=9))
    patient = FairShare(patience=600)
    assert jobs(turns(ledger, 8, patient)) == [high.id] * 8
    seconds, _ = ledger.client.time()
    ledger.client.zadd(SERVED, {"0": (seconds - 601) * 1000})
    assert jobs(turns(ledger, 8, patient)) == [low.id, *[high.id] * 7]
