"""What a slot does with a shard: answers in order, one commit, and nothing at all once the lease is another's."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from engine.errors import RequestError
from engine.outputs import PoolingOutput, RequestOutput
from jobs.broker import ASSEMBLE, CONTROL_QUEUE
from jobs.errors import ServiceUnreachable, StorageError
from jobs.ledger import Lease
from jobs.records import SegmentRecord, Usage
from jobs.spec import OpenAIRows
from tests.jobs.ledgers import key, let_leases_run_out
from tests.jobs.site import Site, prompts
from tests.workers.conftest import WAIT_S, WINDOW, Bench, at_work
from tests.workers.stub_engine import Engines, answer_to, text_of


def segment(site: Site, spec: Any, shard: int = 0) -> SegmentRecord:
    record = site.ledger.records(spec.id)[shard]
    assert isinstance(record, SegmentRecord)
    return record


def lines(site: Site, spec: Any, shard: int = 0, part: int = 0) -> list[Any]:
    """The output lines of a shard's segment; part 1: its error lines."""
    info = segment(site, spec, shard).objects(spec.layout, shard)[part]
    return site.rows(info.url) if info else []


def tries(site: Site, spec: Any) -> dict[str, str]:
    return site.ledger.client.hgetall(key(spec.id, "tries"))


def unreachable(*args: Any, **fields: Any) -> None:
    raise ServiceUnreachable("The store is down.")


# --- what is committed --------------------------------------------------------------------------------------------


def test_shards_are_answered_and_committed_until_none_is_ready(bench: Bench) -> None:
    spec = bench.site.planned(10)
    bench.work(spec)
    view = bench.site.ledger.view(spec.id)
    assert (view.state, view.done, view.failed, view.in_flight) == ("finalizing", 10, 0, 0)
    assert view.usage == Usage(prompt_tokens=30, completion_tokens=20, cached_tokens=10)
    assert [row["response"] for shard in range(3) for row in lines(bench.site, spec, shard)] == [
        f"answer to question {n}" for n in range(10)
    ]
    assert segment(bench.site, spec).engine == "stub"
    assert (ASSEMBLE, f"('{spec.id}',)") in bench.site.queued(CONTROL_QUEUE)


def test_shards_whose_rows_begin_alike_follow_each_other_and_the_output_keeps_its_order(
    bench: Bench, engines: Engines
) -> None:
    texts = [f"{letter * 600}: question {number}" for number in range(2) for letter in "abcdefgh"]
    spec = bench.site.submit([{"prompt": text} for text in texts])
    bench.site.control.plan(spec.id)
    bench.work(spec)
    assert "".join(text[0] for text in engines.asked) == "abcdabcdefghefgh"
    assert bench.site.ledger.client.hkeys(key(spec.id, "at")) == [bench.context.worker_id]
    bench.site.control.assemble(spec.id)
    assert [row["prompt"] for row in bench.site.rows(spec.output_url)] == texts


def test_a_row_of_several_inputs_is_settled_when_all_are(bench: Bench, engines: Engines) -> None:
    def vector(prompt: Any) -> Any:
        return PoolingOutput(0, (1, 2), np.array([len(prompt)], np.float32))

    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["a" * k for k in inputs]}}
        for n, inputs in enumerate([[3, 1, 2], [5]])
    ]
    engines.rules = vector
    spec = bench.site.submit(rows, rows=OpenAIRows())
    bench.site.control.plan(spec.id)
    bench.work(spec)
    found = [[item["embedding"] for item in row["response"]["body"]["data"]] for row in lines(bench.site, spec)]
    assert found == [[[3], [1], [2]], [[5]]]
    assert bench.site.ledger.view(spec.id).usage == Usage(prompt_tokens=8)


def test_a_stop_is_heard_while_an_input_of_a_row_is_not_answered(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    body = {"input": ["a", "b"]}
    spec = bench.site.submit(
        [{"custom_id": "r", "method": "POST", "url": "/v1/embeddings", "body": body}], rows=OpenAIRows()
    )
    bench.site.control.plan(spec.id)
    with at_work(bench, spec):
        engines.last.wait_for(2)
        (index, _), _ = engines.last.in_flight()
        engines.last.answer(index, PoolingOutput(0, (1,), np.zeros(1, np.float32)))
        bench.context.stopping.set()
    assert tries(bench.site, spec) == {"0": "0"}


def test_rows_stand_in_order_whatever_order_they_are_answered_in(
    bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.by_hand = True
    spec = bench.site.planned(3)
    with at_work(bench, spec):
        engines.last.wait_for(3)
        for index, prompt in reversed(engines.last.in_flight()):
            engines.last.answer(index, answer_to(prompt))
    assert [row["response"] for row in lines(bench.site, spec)] == [f"answer to question {n}" for n in range(3)]


def test_no_more_rows_than_the_window_are_in_the_engine(bench: Bench, engines: Engines) -> None:
    """Nor are more held that wait for one before them."""
    engines.by_hand = True
    spec = bench.site.planned(4)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        (_, _), *others = engines.last.in_flight()
        for index, prompt in others:
            engines.last.answer(index, answer_to(prompt))
        assert not engines.last.has(WINDOW - len(others) + 1, within_s=0.2)
        first, prompt = engines.last.in_flight()[0]
        engines.last.answer(first, answer_to(prompt))
        engines.last.wait_for(1)
        engines.last.step()
    assert engines.most_in_flight == WINDOW
    assert len(lines(bench.site, spec)) == 4


def test_a_refused_row_is_an_error_row_and_is_not_asked(bench: Bench, engines: Engines) -> None:
    spec = bench.site.submit([{"prompt": "a"}, {"prompt": 7}, {"prompt": "c"}])
    bench.site.control.plan(spec.id)
    bench.work(spec)
    assert [row["error"] and row["error"]["code"] for row in lines(bench.site, spec)] == [None, "invalid_type", None]
    assert [error["line"] for error in lines(bench.site, spec, part=1)] == [2]
    assert (segment(bench.site, spec).ok, segment(bench.site, spec).failed) == (2, 1)
    assert engines.asked == ["a", "c"]


def test_a_row_that_the_engine_refuses_is_an_error_row(bench: Bench, engines: Engines) -> None:
    def refuse_long(prompt: Any) -> RequestOutput:
        if text_of(prompt) == "long":
            return RequestOutput.rejected(0, RequestError("Too long.", code="context_length_exceeded", field="prompt"))
        return answer_to(prompt)

    engines.rules = refuse_long
    spec = bench.site.submit([{"prompt": "a"}, {"prompt": "long"}])
    bench.site.control.plan(spec.id)
    bench.work(spec)
    (error,) = lines(bench.site, spec, part=1)
    assert (error["line"], error["error"]["code"], error["error"]["param"]) == (2, "context_length_exceeded", "prompt")


def test_a_row_that_kills_the_engine_costs_that_row_only(bench: Bench) -> None:
    spec = bench.site.submit([{"prompt": "a"}, {"prompt": "poison"}, {"prompt": "c"}, {"prompt": "d"}])
    bench.site.control.plan(spec.id)
    bench.work(spec)
    rows = lines(bench.site, spec)
    assert [row["response"] for row in rows] == ["answer to a", None, "answer to c", "answer to d"]
    assert rows[1]["error"]["code"] == "engine_error"
    assert tries(bench.site, spec) == {"0": "1"}


# --- what is abandoned --------------------------------------------------------------------------------------------


def test_a_lost_lease_is_abandoned_and_nothing_is_put_or_committed(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    site = bench.site
    spec = site.planned(4)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        heir = take_over(site, spec)
        # The next beat says so, and the slot gives up its rows.
        engines.last.wait_until_empty()
    assert site.ledger.records(spec.id) == {}
    assert list(site.stores.list(f"{spec.layout.root}/att/")) == []
    assert site.ledger.commit(heir, site.segment(heir)) == "ok"


def test_a_zombie_that_finishes_late_commits_nothing(
    bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No beat has told it: it finds out when it commits."""
    monkeypatch.setattr(bench.context.heartbeat, "hold", lambda held: None)
    engines.by_hand = True
    site = bench.site
    spec = site.planned(3)
    with at_work(bench, spec):
        engines.last.wait_for(3)
        heir = take_over(site, spec)
        assert site.ledger.commit(heir, site.segment(heir)) == "ok"
        engines.last.step()
    assert segment(site, spec).attempt == heir.attempt
    assert site.ledger.view(spec.id).done == 3


def take_over(site: Site, spec: Any) -> Lease:
    let_leases_run_out(site.ledger.client, spec.id)
    # A beat may come in between and keep the lease alive: time goes on until it has not.
    while site.ledger.expire(spec.id)[0] == 0:
        let_leases_run_out(site.ledger.client, spec.id)
    heir = site.lease(spec)
    assert heir is not None
    return heir


def test_a_cancelled_job_is_abandoned(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = bench.site.planned(8)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        bench.site.ledger.cancel(spec.id)
        engines.last.wait_until_empty()
    assert bench.site.ledger.records(spec.id) == {}


def test_a_stop_gives_the_shard_back_and_counts_no_try(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = bench.site.planned(8)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        bench.context.stopping.set()
    view = bench.site.ledger.view(spec.id)
    assert (view.state, view.leased, view.in_flight, view.settled) == ("in_progress", 0, 0, 0)
    assert tries(bench.site, spec) == {"0": "0"}
    assert bench.site.ledger.client.zcard(key(spec.id, "ready")) == 2
    assert engines.last.in_flight() == []


def test_a_stopped_worker_leases_nothing(bench: Bench) -> None:
    bench.context.stopping.set()
    spec = bench.site.planned(4)
    bench.work(spec)
    assert tries(bench.site, spec) == {}


def test_a_stop_that_comes_as_the_lease_is_taken_is_heard(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = bench.site.ledger.lease

    def stopped_meanwhile(*args: Any, **fields: Any) -> Any:
        found = lease(*args, **fields)
        bench.context.stopping.set()
        return found

    monkeypatch.setattr(bench.site.ledger, "lease", stopped_meanwhile)
    spec = bench.site.planned(4)
    bench.work(spec)
    assert tries(bench.site, spec) == {"0": "0"}
    assert bench.site.ledger.view(spec.id).leased == 0


def test_an_engine_that_is_stopped_first_gives_the_shard_back(bench: Bench, engines: Engines) -> None:
    engines.by_hand = True
    spec = bench.site.planned(4)
    with at_work(bench, spec):
        engines.last.wait_for(WINDOW)
        bench.context.stopping.set()
        bench.context.host.stop()
    assert tries(bench.site, spec) == {"0": "0"}


# --- services that do not answer ----------------------------------------------------------------------------------


def failing(times: int, error: Exception, act: Any) -> Any:
    left = [error] * times

    def act_or_fail(*args: Any, **fields: Any) -> Any:
        if left:
            raise left.pop()
        return act(*args, **fields)

    return act_or_fail


@pytest.mark.parametrize("step", ["lease", "commit"])
def test_a_ledger_that_is_away_for_a_while_is_asked_again(
    bench: Bench, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.site.ledger
    spec = bench.site.planned(4)
    monkeypatch.setattr(ledger, step, failing(5, RedisConnectionError("gone"), getattr(ledger, step)))
    bench.work(spec)
    assert ledger.view(spec.id).done == 4
    assert tries(bench.site, spec) == {"0": "1"}


def test_a_ledger_that_is_away_after_the_commit_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bench.site.planned(4)
    state = bench.site.ledger.state
    monkeypatch.setattr(bench.site.ledger, "state", failing(1, RedisConnectionError("gone"), state))
    bench.work(spec)
    assert bench.site.ledger.view(spec.id).state == "finalizing"


@pytest.mark.parametrize("step", ["stream", "put_file"])
def test_a_store_that_is_away_for_a_while_costs_no_try(
    bench: Bench, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = bench.site.planned(4)
    act = getattr(bench.site.stores, step)
    monkeypatch.setattr(bench.site.stores, step, failing(5, ServiceUnreachable("down"), act))
    bench.work(spec)
    assert [row["response"] for row in lines(bench.site, spec)] == [f"answer to question {n}" for n in range(4)]
    assert tries(bench.site, spec) == {"0": "1"}


def test_an_input_that_breaks_off_is_read_on_at_the_same_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bench.site.planned(4)
    stream = bench.site.stores.stream
    breaks = [30, 50, 0]

    def breaking(url: str, start: int, end: int, etag: str) -> Iterator[bytes]:
        data = b"".join(stream(url, start, end, etag))
        if breaks:
            yield data[: breaks.pop()]
            raise ServiceUnreachable("cut")
        yield data

    monkeypatch.setattr(bench.site.stores, "stream", breaking)
    bench.work(spec)
    assert [row["response"] for row in lines(bench.site, spec)] == [f"answer to question {n}" for n in range(4)]


def test_a_lease_lost_while_a_store_is_away_is_abandoned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bench.site.planned(4)
    waiting = threading.Event()

    def down(*args: Any) -> None:
        waiting.set()
        unreachable()

    with monkeypatch.context() as patch:
        patch.setattr(bench.site.stores, "put_file", down)
        with at_work(bench, spec):
            assert waiting.wait(WAIT_S)
            bench.site.ledger.cancel(spec.id)
    assert bench.site.ledger.records(spec.id) == {}


def test_a_stop_while_a_store_is_away_gives_the_shard_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = bench.site.planned(4)
    waiting = threading.Event()

    def down(*args: Any) -> None:
        waiting.set()
        unreachable()

    monkeypatch.setattr(bench.site.stores, "put_file", down)
    with at_work(bench, spec):
        assert waiting.wait(WAIT_S)
        bench.context.stopping.set()
    assert tries(bench.site, spec) == {"0": "0"}


def test_a_try_that_fails_says_why_and_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise StorageError("Access to bucket 'x' is refused.")

    spec = bench.site.planned(4, max_tries=2)
    monkeypatch.setattr(bench.site.stores, "put_file", refused)
    monkeypatch.setattr("workers.attempt._REFUSAL_PATIENCE_S", 0)
    bench.work(spec)
    view = bench.site.ledger.view(spec.id)
    assert view.reason == "shard 0 is tried again: Access to bucket 'x' is refused."
    # It rests before it is ready again, and is then handed out a second time.
    assert (view.leased, bench.site.ledger.expire(spec.id)) == (1, (0, 0, 1))
    bench.site.ledger.client.zadd(f"pm:{{{spec.id}}}:leases", {"0": 0})
    assert bench.site.ledger.expire(spec.id) == (1, 1, 0)
    bench.work(spec)
    assert tries(bench.site, spec) == {"0": "2"}


def test_a_store_that_refuses_a_segment_is_asked_again_and_nothing_is_generated_twice(
    bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, reasons = bench.site.stores.put_file, []

    def refused_once(*args: Any) -> Any:
        if not reasons:
            reasons.append("refused")
            raise StorageError("Access to bucket 'x' is refused.")
        reasons.append(bench.site.ledger.view(spec.id).reason or "")
        return put(*args)

    spec = bench.site.planned(4)
    monkeypatch.setattr(bench.site.stores, "put_file", refused_once)
    monkeypatch.setattr("workers.attempt._MAX_RETRY_S", 0.01)
    bench.work(spec)
    assert bench.site.ledger.state(spec.id) == "finalizing"
    assert tries(bench.site, spec) == {"0": "1"}
    assert len(engines.asked) == 4
    assert reasons[1] == "shard 0 is tried again: Access to bucket 'x' is refused."


def test_a_fault_of_the_machine_costs_no_try_and_the_slot_rests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """More often than a shard may be tried."""
    put, reasons = bench.site.stores.put_file, []

    def full(*args: Any) -> Any:
        if len(reasons) <= spec.max_tries:
            reasons.append(bench.site.ledger.view(spec.id).reason)
            raise OSError(28, "No space left on device")
        return put(*args)

    rests: list[float] = []
    monkeypatch.setattr(bench.context.stopping, "wait", rests.append)
    spec = bench.site.planned(4)
    monkeypatch.setattr(bench.site.stores, "put_file", full)
    bench.work(spec)
    assert reasons[1:] == ["shard 0 is tried again: worker w: [Errno 28] No space left on device"] * spec.max_tries
    assert rests == [15.0] * (spec.max_tries + 1)
    assert tries(bench.site, spec) == {"0": "1"}
    assert bench.site.ledger.faults(spec.id) == {}


def test_a_job_that_this_version_cannot_read_is_left_to_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, readable = bench.site.planned(4), bench.site.submit(prompts(4))
    bench.site.control.plan(readable.id)
    newer = json.dumps({**json.loads(spec.model_dump_json()), "of_the_future": 1})
    bench.site.ledger.client.hset(key(spec.id, "job"), "spec", newer)
    rests: list[float] = []

    def rest(seconds: float) -> bool:
        rests.append(seconds)
        if bench.site.ledger.state(readable.id) == "finalizing":
            bench.context.stopping.set()
        return False

    monkeypatch.setattr(bench.context.stopping, "wait", rest)
    bench.work(readable)
    assert bench.site.ledger.state(readable.id) == "finalizing"
    assert set(rests) == {15.0}
    assert tries(bench.site, spec) == {"0": "0"}
    assert "of_the_future" in bench.site.ledger.faults(spec.id)[0]
    assert not bench.site.ledger.client.exists(key(spec.id, "own"))


def test_a_stop_while_a_failed_try_cannot_be_reported_ends_quietly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> None:
        raise OSError(36, "File name too long")

    waiting = threading.Event()

    def away(*args: Any) -> None:
        waiting.set()
        raise RedisConnectionError("gone")

    spec = bench.site.planned(4)
    monkeypatch.setattr(bench.site.stores, "put_file", refused)
    monkeypatch.setattr(bench.site.ledger, "release", away)
    with at_work(bench, spec):
        assert waiting.wait(WAIT_S)
        bench.context.stopping.set()
    assert bench.site.ledger.view(spec.id).leased == 0


def test_an_input_that_changed_fails_the_job_and_mixes_no_rows(bench: Bench) -> None:
    spec = bench.site.planned(8)
    bench.site.stores.put(spec.input.files[0].url, b'{"prompt": "another"}\n' * 8)
    bench.work(spec)
    view = bench.site.ledger.view(spec.id)
    assert (view.state, [error.code for error in view.errors]) == ("failed", ["input_changed"])
    assert bench.site.ledger.records(spec.id) == {}


# --- several at once ----------------------------------------------------------------------------------------------


def test_slots_that_share_an_engine_do_not_mix_their_rows(bench: Bench) -> None:
    specs = [bench.site.planned(30), bench.site.submit(prompts(30))]
    bench.site.control.plan(specs[1].id)
    slots = [threading.Thread(target=bench.work, args=(specs[0],)) for _ in range(4)]
    for slot in slots:
        slot.start()
    for slot in slots:
        slot.join(WAIT_S)
    for spec in specs:
        bench.site.control.assemble(spec.id)
        rows = bench.site.rows(spec.output_url)
        assert [(row["prompt"], row["response"]) for row in rows] == [
            (f"question {n}", f"answer to question {n}") for n in range(30)
        ]
