"""What a job's owner orders while it runs: obeyed at once, and by a ledger that was built anew from storage."""

import pytest

from jobs import orders
from jobs.broker import ASSEMBLE, CONTROL_QUEUE
from jobs.control import Control
from jobs.errors import EXIT_DONE, EXIT_USAGE, ServiceUnreachable, StorageError
from jobs.recover import recover
from jobs.spec import JobSpec, Terms
from jobs.submit import enter
from tests.jobs.commands import Command
from tests.jobs.ledgers import key
from tests.jobs.site import Site, prompts


def lost_and_recovered(site: Site, spec: JobSpec) -> None:
    """Redis is empty of a sudden; what is recovered is what a recovery reads in storage."""
    site.ledger.client.flushall()
    stored = JobSpec.model_validate_json(site.stores.read(spec.layout.spec))
    recover(stored, site.ledger, site.stores, site.tokens, site.control)


# --- priority, weight, deadline -----------------------------------------------------------------------------------


def test_a_job_that_gets_a_higher_priority_is_served_before_the_others(site: Site, pagemill: Command) -> None:
    first, second = site.planned(8, created_at=1), site.planned(8, created_at=2)
    lease = site.lease(first)
    assert lease is not None
    assert lease.job_id == first.id
    assert pagemill("set", second.id, "--priority", "5").out == "in_progress: priority 5, tenant default\n"
    served = [site.lease(first) for _ in range(3)]
    assert [lease and lease.job_id for lease in served] == [second.id, second.id, first.id]
    view = pagemill("status", second.id, "--json").json
    assert (view["priority"], view["weight"], view["expires_at"]) == (5, 1.0, None)


def test_a_weight_that_changes_counts_from_the_next_shard_on(site: Site, pagemill: Command) -> None:
    heavy, light = site.planned(80), site.planned(80)
    assert pagemill("set", heavy.id, "--weight", "3").code == EXIT_DONE
    served = [site.lease(heavy) for _ in range(12)]
    assert [lease and lease.job_id for lease in served].count(heavy.id) == 9
    assert "weight 3" in pagemill("status", heavy.id).out
    assert light.weight == 1


def test_a_deadline_is_set_moved_and_taken_away(site: Site, pagemill: Command) -> None:
    spec = site.planned(4)
    assert pagemill("set", spec.id, "--expires", "2099-01-31T06:00Z", "--json").json["expires_at"] == 4073522400
    site.ledger.client.hset(key(spec.id, "job"), "expires_at", 1)
    site.ledger.client.zadd("pm:deadlines", {spec.id: 1})
    assert pagemill("set", spec.id, "--expires", "never", "--json").json["expires_at"] is None
    assert site.ledger.overdue() == []
    assert site.ledger.expire_job(spec.id) == "early"


def test_a_retry_has_the_terms_that_its_parent_had_last(site: Site, pagemill: Command) -> None:
    spec = site.submit([{"prompt": "a"}, {"text": "b"}])
    site.control.plan(spec.id)
    pagemill("set", spec.id, "--priority", "4", "--weight", "2")
    site.work(spec)
    site.control.assemble(spec.id)
    child = pagemill("retry", spec.id, "--failed", "--json").json
    assert (child["priority"], child["weight"]) == (4, 2.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "Say what to change"),
        (("--priority", "1001"), "--priority: "),
        (("--weight", "0"), "--weight: "),
        (("--expires", "2001-01-01"), "is not in the future"),
    ],
)
def test_terms_that_cannot_be_change_nothing(
    options: tuple[str, ...], words: str, site: Site, pagemill: Command
) -> None:
    spec = site.planned(4)
    before = site.ledger.view(spec.id)
    done = pagemill("set", spec.id, *options, "--json")
    assert (done.code, words in done.error["message"]) == (EXIT_USAGE, True)
    assert site.ledger.view(spec.id) == before


def test_the_terms_of_a_job_that_has_ended_do_not_change(site: Site, pagemill: Command) -> None:
    spec = site.planned(4)
    site.work(spec)
    site.control.assemble(spec.id)
    done = pagemill("set", spec.id, "--priority", "3", "--json")
    assert (done.code, done.error["code"]) == (EXIT_USAGE, "not_changeable")
    assert pagemill("set", "nothing", "--priority", "3", "--json").error["code"] == "no_such_job"


# --- a ledger that was lost ---------------------------------------------------------------------------------------


def test_a_paused_job_comes_back_paused_and_is_not_worked_on(any_site: Site) -> None:
    site = any_site
    spec = site.planned(12)
    site.work(spec, shards=1)
    assert orders.pause(spec.id, site.ledger, site.stores) == "ok"
    lost_and_recovered(site, spec)
    view = site.ledger.view(spec.id)
    assert (view.state, view.paused, view.settled) == ("in_progress", True, 1)
    assert site.lease(spec) is None
    assert orders.resume(spec.id, site.ledger, site.stores) == "ok"
    lost_and_recovered(site, spec)
    assert not site.ledger.view(spec.id).paused
    assert site.lease(spec) is not None


def test_a_paused_job_is_never_without_its_pause_while_it_is_recovered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery that stops in the middle leaves the rest to the sweeper, which knows nothing of pauses."""
    spec = site.planned(8)
    orders.pause(spec.id, site.ledger, site.stores)

    def stop(control: Control, job_id: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Control, "plan", stop)
        with pytest.raises(KeyboardInterrupt):
            lost_and_recovered(site, spec)
    site.control.plan(spec.id)
    assert site.ledger.view(spec.id).paused
    assert site.lease(spec) is None


@pytest.mark.parametrize("planned", [True, False])
def test_a_job_that_was_being_cancelled_is_cancelled_and_keeps_what_it_has(planned: bool, site: Site) -> None:
    spec = site.planned(12) if planned else site.submit(prompts(12))
    site.work(spec, shards=1)
    assert orders.cancel(spec.id, site.ledger, site.stores) == "ok"
    lost_and_recovered(site, spec)
    assert site.ledger.state(spec.id) == "cancelling"
    assert (ASSEMBLE, f"('{spec.id}',)") in site.queued(CONTROL_QUEUE)
    assert site.lease(spec) is None
    site.control.assemble(spec.id)
    view = site.ledger.view(spec.id)
    assert (view.state, view.done) == ("cancelled", 4 * planned)
    lost_and_recovered(site, spec)
    again = site.ledger.view(spec.id)
    assert (again.state, again.done, again.paused) == ("cancelled", view.done, False)


def test_terms_that_were_changed_are_those_of_the_recovered_job(any_site: Site) -> None:
    site = any_site
    spec = site.planned(8, expires_at=2**40, tenant="rag")
    orders.set_terms(spec.id, site.ledger, site.stores, priority=-7, expires_at=2**41)
    orders.set_terms(spec.id, site.ledger, site.stores, weight=2.5)
    before = site.ledger.view(spec.id)
    lost_and_recovered(site, spec)
    after = site.ledger.view(spec.id)
    assert (after.priority, after.weight, after.expires_at, after.tenant) == (-7, 2.5, 2**41, "rag")
    assert after.model_copy(update={"in_progress_at": before.in_progress_at}) == before
    orders.set_terms(spec.id, site.ledger, site.stores, expires_at="never")
    lost_and_recovered(site, spec)
    assert site.ledger.view(spec.id).expires_at is None


def test_a_submit_that_is_repeated_after_the_loss_obeys_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nightly job submits under its key again, before anybody has recovered anything."""
    spec = site.planned(8)
    orders.pause(spec.id, site.ledger, site.stores)
    site.ledger.client.flushall()
    again = spec.model_copy(update={"created_at": spec.created_at + 60})
    assert enter(again, site.ledger, site.stores, site.tokens) == spec
    site.control.plan(spec.id)
    assert site.ledger.view(spec.id).paused


def test_an_order_that_storage_did_not_take_fails_and_can_be_given_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = site.planned(8)

    def refuse(*args: object) -> None:
        raise ServiceUnreachable("gone in this moment")

    with monkeypatch.context() as patch:
        patch.setattr(site.stores, "put", refuse)
        with pytest.raises(ServiceUnreachable):
            orders.pause(spec.id, site.ledger, site.stores)
    assert site.ledger.view(spec.id).paused
    assert orders.pause(spec.id, site.ledger, site.stores) == "ok"
    assert orders.standing_orders(spec.layout, site.stores) == orders.Orders(paused=True)


def test_a_job_without_orders_has_none(site: Site) -> None:
    spec = site.planned(4)
    found = orders.standing_orders(spec.layout, site.stores)
    assert found == orders.Orders()
    assert found.applied_to(spec) == spec
    changed = orders.Orders(terms=Terms(priority=3, tenant="another", dedupe="all"))
    assert changed.applied_to(spec) == spec.model_copy(update={"priority": 3})


def test_a_job_that_failed_has_failed_and_does_not_run_again(any_site: Site) -> None:
    """Its output may be another's by now, which came after it."""
    site = any_site
    spec = site.submit([{"prompt": "a"}, {"text": "b"}], on_bad_row="fail")
    site.control.plan(spec.id)
    before = site.ledger.view(spec.id)
    assert (before.state, before.error_count) == ("failed", 1)
    heir = site.submit(prompts(4), output_url=spec.output_url, error_url=f"{spec.output_url}-errors")
    site.control.plan(heir.id)
    site.work(heir)
    site.control.assemble(heir.id)
    result = site.stores.read(heir.output_url)
    site.ledger.client.flushall()
    for one in (spec, heir):
        recover(one, site.ledger, site.stores, site.tokens, site.control)
    after = site.ledger.view(spec.id)
    assert after.model_copy(update={"ended_at": before.ended_at}) == before
    assert (site.ledger.state(heir.id), site.stores.read(heir.output_url)) == ("completed", result)


def test_a_failure_that_storage_did_not_take_is_a_failure(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = site.submit([{"text": "b"}], on_bad_row="fail")
    put = site.stores.put

    def refuse(url: str, data: bytes) -> object:
        if url == spec.layout.failure:
            raise StorageError("no right to write here")
        return put(url, data)

    monkeypatch.setattr(site.stores, "put", refuse)
    site.control.plan(spec.id)
    assert site.ledger.state(spec.id) == "failed"
