"""The checker and the history are what other tests rest on: each finds each fault that it is there for.

Results are forged with their manifest to match, so that it is the row that gives a lie away and not the size of a file.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import ObjectNotFound, RowError
from jobs.ledger import Lease, Ledger
from jobs.planner import PlannedRow, shard_rows
from jobs.records import Manifest, SegmentRecord, Usage
from jobs.results import Choice, Completion
from jobs.spec import JobSpec
from jobs.spool import Spool
from tests.jobs.ledgers import key
from tests.jobs.site import Site, prompts
from tests.servers import ValkeyServer
from tests.system.checker import Ending, check
from tests.system.history import BrokenPromise, History, commands
from tests.system.stub_engine import answer_to
from workers.render import seed_of

ROWS, REFUSED_ROW = 10, 5
ERRORS = {REFUSED_ROW: "refused_by_stub"}
Row = dict[str, Any]

# --- the checker ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A job that has ended: ten rows in three shards, of which one row failed."""

    site: Site
    valkey: ValkeyServer
    spec: JobSpec

    def check(self, errors: dict[int, str] = ERRORS, ending: Ending = "completed") -> Manifest:
        self.valkey.wait_until_written()
        asked = [row["prompt"] for row in prompts(ROWS)]
        return check(self.spec, asked, self.site.stores, History(self.valkey.data_dir), ending=ending, errors=errors)

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.site.stores.read(self.spec.layout.manifest))

    def forge_manifest(self, change: Callable[[dict[str, Any]], Any]) -> None:
        manifest = self.manifest
        change(manifest)
        self.site.stores.put(self.spec.layout.manifest, json.dumps(manifest).encode())

    def forge(self, which: str, data: bytes) -> None:
        """Another `output` or `errors` file, with a manifest that says so."""
        self.site.stores.put(self.manifest[which]["url"], data)
        self.forge_manifest(lambda m: m[which].update(size=len(data), lines=data.count(b"\n")))

    def lines(self, which: str) -> list[bytes]:
        return self.site.stores.read(self.manifest[which]["url"]).splitlines(keepends=True)


@pytest.fixture
def site(own_valkey: ValkeyServer, tmp_path: Path) -> Site:
    settings = own_valkey.settings(storage=f"file://{tmp_path}/store", max_shard_rows=4)
    return Site.of(settings, Ledger(own_valkey.client))


@pytest.fixture
def done(site: Site, own_valkey: ValkeyServer) -> Done:
    spec = site.planned(ROWS)
    while (lease := site.lease(spec)) is not None:
        assert site.ledger.commit(lease, segment(site, lease)) == "ok"
    site.control.assemble(spec.id)
    return Done(site, own_valkey, spec)


def segment(site: Site, lease: Lease) -> SegmentRecord:
    with Spool(lease.spec, site.stores) as spool:
        for planned in shard_rows(lease.spec, site.stores, lease.shard):
            spool.add(planned, outcome(lease.spec, planned))
        return spool.put(lease, "a test")


def outcome(spec: JobSpec, planned: PlannedRow) -> Completion | RowError:
    if planned.index == REFUSED_ROW:
        return RowError(code=ERRORS[REFUSED_ROW], message="No.")
    text = answer_to(f"question {planned.index}", seed_of(spec.id, planned.index))
    return Completion((Choice(text, "stop"),), Usage())


def test_a_job_that_kept_its_promises_passes(done: Done) -> None:
    assert done.check().state == "completed"


def test_a_stopped_job_that_kept_its_promises_passes(site: Site, own_valkey: ValkeyServer) -> None:
    spec = site.planned(ROWS)
    lease = site.lease(spec)
    assert lease is not None
    assert site.ledger.commit(lease, segment(site, lease)) == "ok"
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    stopped = Done(site, own_valkey, spec)
    assert stopped.check({}, "cancelled").ok == 4
    with pytest.raises(AssertionError, match="state"):
        stopped.check({}, "expired")
    rows = stopped.manifest["rows"]
    stopped.forge_manifest(lambda m: m.update(rows=0))
    with pytest.raises(AssertionError, match="rows"):
        stopped.check({}, "cancelled")
    stopped.forge_manifest(lambda m: m.update(rows=rows))
    site.stores.put(spec.layout.remaining, b"".join(site.stores.read(spec.layout.remaining).splitlines(True)[1:]))
    with pytest.raises(AssertionError, match="remains"):
        stopped.check({}, "cancelled")


def test_a_job_that_was_stopped_before_it_was_planned_passes(site: Site, own_valkey: ValkeyServer) -> None:
    spec = site.submit(prompts(ROWS))
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    assert Done(site, own_valkey, spec).check({}, "cancelled").rows == 0


def swap(rows: list[Row]) -> None:
    rows[1], rows[2] = rows[2], rows[1]


OUTPUT_LIES: dict[str, Callable[[list[Row]], Any]] = {
    "a row is lost": lambda rows: rows.pop(3),
    "a row is there twice": lambda rows: rows.insert(3, rows[3]),
    "a row is there instead of another": lambda rows: rows[3].update(rows[4]),
    "two rows are swapped": swap,
    "a row has another's answer": lambda rows: rows[1].update(response=rows[2]["response"]),
    "a row has no answer": lambda rows: rows[1].update(response=None),
    "a row has an answer and an error": lambda rows: rows[1].update(error=rows[REFUSED_ROW]["error"]),
    "a failed row has an answer": lambda rows: rows[REFUSED_ROW].update(response="yes"),
    "a failed row has another error": lambda rows: rows[REFUSED_ROW]["error"].update(code="engine_error"),
}


@pytest.mark.parametrize("lie", OUTPUT_LIES)
def test_the_output_lies(lie: str, done: Done) -> None:
    rows = [json.loads(line) for line in done.lines("output")]
    OUTPUT_LIES[lie](rows)
    done.forge("output", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    with pytest.raises(AssertionError):
        done.check()


@pytest.mark.parametrize("which", ["output", "errors"])
def test_the_last_line_of_a_file_is_cut(which: str, done: Done) -> None:
    done.forge(which, b"".join(done.lines(which))[:-1])
    with pytest.raises(AssertionError, match="cut"):
        done.check()


def test_the_error_file_has_another_row(done: Done) -> None:
    done.forge("errors", b"".join(done.lines("errors")).replace(b"question 5", b"question 6"))
    with pytest.raises(AssertionError):
        done.check()


def test_the_error_file_misses_a_row(done: Done) -> None:
    done.forge("errors", b"")
    with pytest.raises(AssertionError):
        done.check()


def test_an_error_is_not_told(done: Done) -> None:
    with pytest.raises(AssertionError):
        done.check({})


def test_an_error_that_was_expected_did_not_come(done: Done) -> None:
    with pytest.raises(AssertionError):
        done.check({**ERRORS, 6: "refused_by_stub"})


MANIFEST_LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a segment is missing": lambda m: m["segments"].pop(1),
    "a segment is there twice": lambda m: m["segments"].insert(1, m["segments"][1]),
    "segments are in another order": lambda m: m["segments"].reverse(),
    "segments overlap": lambda m: m["segments"][1].update(first_row=3),
    "a segment has more rows than its shard": lambda m: m["segments"][1]["record"].update(ok=4),
    "a row more is counted": lambda m: m.update(ok=m["ok"] + 1),
    "the output is said to be longer": lambda m: m["output"].update(size=m["output"]["size"] + 1),
    "the error file is said to have more lines": lambda m: m["errors"].update(lines=2),
    "the error file is not told of": lambda m: m.update(errors=None),
    "the job is said to be cancelled": lambda m: m.update(state="cancelled"),
}


@pytest.mark.parametrize("lie", MANIFEST_LIES)
def test_the_manifest_lies(lie: str, done: Done) -> None:
    done.forge_manifest(MANIFEST_LIES[lie])
    with pytest.raises(AssertionError):
        done.check()


def test_the_manifest_has_a_segment_that_was_never_committed(done: Done) -> None:
    """Its objects are whole, as an orphan's are."""
    layout, stores = done.spec.layout, done.site.stores

    def put_in(manifest: dict[str, Any]) -> None:
        record = manifest["segments"][0]["record"]
        committed = stores.read(layout.segment(0, record["fence"], record["attempt"]))
        record["attempt"] = "0" * 32
        stores.put(layout.segment(0, record["fence"], record["attempt"]), committed)

    done.forge_manifest(put_in)
    with pytest.raises(AssertionError, match="never committed"):
        done.check()


@pytest.mark.parametrize("tamper", [lambda data: data[:-20], lambda data: data.replace(b"answer", b"Answer")])
def test_a_segment_is_not_what_was_put(tamper: Callable[[bytes], bytes], done: Done) -> None:
    found, _ = SegmentRecord.model_validate(done.manifest["segments"][1]["record"]).objects(done.spec.layout, 1)
    assert found is not None
    data = done.site.stores.read(found.url)
    assert tamper(data) != data
    done.site.stores.put(found.url, tamper(data))
    with pytest.raises(AssertionError):
        done.check()


def test_a_segment_has_another_number_of_lines_than_its_record_says(done: Done) -> None:
    layout, stores = done.spec.layout, done.site.stores

    def shorten(manifest: dict[str, Any]) -> None:
        record = manifest["segments"][0]["record"]
        url = layout.segment(0, record["fence"], record["attempt"])
        data = b"".join(stores.read(url).splitlines(keepends=True)[:-1])
        stores.put(url, data)
        record["output"].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    done.forge_manifest(shorten)
    with pytest.raises(AssertionError):
        done.check()


def test_a_segment_is_gone(done: Done) -> None:
    found, _ = SegmentRecord.model_validate(done.manifest["segments"][2]["record"]).objects(done.spec.layout, 2)
    assert found is not None
    done.site.stores.delete([found.url])
    with pytest.raises(ObjectNotFound):
        done.check()


def test_there_is_an_error_file_and_no_error(done: Done, site: Site) -> None:
    spec = site.planned(4)
    while (lease := site.lease(spec)) is not None:
        assert site.ledger.commit(lease, segment(site, lease)) == "ok"
    site.control.assemble(spec.id)
    site.stores.put(spec.error_url, b"{}\n")
    done.valkey.wait_until_written()
    with pytest.raises(AssertionError, match="no error"):
        check(spec, [row["prompt"] for row in prompts(4)], site.stores, History(done.valkey.data_dir))


# --- the history ----------------------------------------------------------------------------------------------------

Command = list[Any]
JOB, OWN, COMMIT = key("j", "job"), key("j", "own"), key("j", "commit")


def write(folder: Path, *some: Command) -> None:
    """As Valkey writes them down."""
    path = folder / "appendonlydir" / "appendonly.aof.1.incr.aof"
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        for command in some:
            words = [str(word).encode() for word in command]
            file.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))


def state(value: str, *fields: Any) -> Command:
    return ["HSET", JOB, "state", value, *fields]


def owned(shard: int, attempt: str, fence: int) -> Command:
    return ["HSET", OWN, f"s:{shard}", attempt, f"a:{attempt}", shard, f"f:{shard}", fence]


def committed(shard: int, attempt: str, verb: str = "HSET") -> Command:
    return [verb, COMMIT, shard, json.dumps({"attempt": attempt})]


def released(shard: int, attempt: str) -> Command:
    return ["HDEL", OWN, f"s:{shard}", f"a:{attempt}", f"f:{shard}"]


SETTLED = ["HINCRBY", JOB, "settled", 1]
OPEN = [state("validating"), ["HSET", JOB, "settled", 0], state("in_progress", "total", 2)]
FIRST_DONE = [owned(0, "a", 1), committed(0, "a"), released(0, "a"), SETTLED]
ALL_DONE = [*OPEN, *FIRST_DONE, owned(1, "b", 2), committed(1, "b"), released(1, "b"), SETTLED]

GOOD: dict[str, list[Command]] = {
    "a job is done": [*ALL_DONE, state("finalizing"), state("completed")],
    "a lease runs out": [*OPEN, owned(0, "a", 1), released(0, "a"), owned(0, "b", 2), committed(0, "b")],
    "a segment vanishes and its shard runs again": [
        *ALL_DONE,
        state("finalizing"),
        ["HDEL", COMMIT, 0],
        ["HINCRBY", JOB, "settled", -1],
        state("in_progress"),
        owned(0, "c", 3),
        committed(0, "c"),
        SETTLED,
        state("finalizing"),
    ],
    "a shard is dead": [*OPEN, ["HSET", COMMIT, 0, '{"dead": true, "tries": 3}']],
    "a job expires with shards to do": [*OPEN, *FIRST_DONE, state("finalizing", "ending", "expired"), state("expired")],
    "a ledger is emptied and recovered": [
        *OPEN,
        *FIRST_DONE,
        ["FLUSHALL"],
        state("validating"),
        committed(0, "a", "HSETNX"),
        state("in_progress", "total", 2),
        owned(1, "c", 1),
        committed(1, "c"),
    ],
    "a job is forgotten and comes again": [
        *ALL_DONE,
        state("finalizing"),
        state("failed"),
        ["DEL", JOB, OWN, COMMIT],
        state("validating"),
    ],
    "other keys are not the ledger's": [["SET", "x", "y"], ["LPUSH", "pm:bk:pm.control", "{}"], ["SELECT", "0"]],
}

BAD: dict[str, list[Command]] = {
    "a record is replaced": [*OPEN, *FIRST_DONE, owned(0, "b", 2), committed(0, "b")],
    "a record is written twice by its attempt": [*OPEN, *FIRST_DONE[:2], committed(0, "a")],
    "one commits what another owns": [*OPEN, owned(0, "a", 1), released(0, "a"), owned(0, "b", 2), committed(0, "a")],
    "one commits what nobody owns": [*OPEN, owned(0, "a", 1), released(0, "a"), committed(0, "a")],
    "one commits another shard": [*OPEN, owned(0, "a", 1), committed(1, "a")],
    "a fence falls": [*OPEN, owned(0, "a", 2), owned(1, "b", 1)],
    "a fence comes twice": [*OPEN, owned(0, "a", 1), released(0, "a"), owned(0, "b", 1)],
    "an attempt has two shards": [*OPEN, owned(0, "a", 1), owned(1, "a", 2)],
    "an attempt has two shards in two ledgers": [*OPEN, owned(0, "a", 1), ["FLUSHALL"], *OPEN, owned(1, "a", 1)],
    "an open job takes a segment over": [*OPEN, committed(0, "a", "HSETNX")],
    "after it was emptied a segment is taken over late": [*OPEN, *FIRST_DONE, ["FLUSHALL"], *OPEN, committed(0, "a")],
    "a job is done with a shard to do": [*OPEN, *FIRST_DONE, state("finalizing")],
    "a shard is counted twice": [*OPEN, *FIRST_DONE, SETTLED, state("finalizing")],
    "a job ends that was never assembled": [*OPEN, state("completed")],
    "a job ends twice": [*ALL_DONE, state("finalizing"), state("completed"), state("cancelled")],
    "a job begins again": [*OPEN, state("validating")],
    "a cancelled job goes on": [*OPEN, state("cancelling"), state("in_progress")],
    "a job begins in the middle": [state("in_progress")],
}


@pytest.mark.parametrize("what", GOOD)
def test_a_history_that_keeps_the_protocol(what: str, tmp_path: Path) -> None:
    write(tmp_path, *GOOD[what])
    assert History(tmp_path).emptied == GOOD[what].count(["FLUSHALL"])


@pytest.mark.parametrize("what", BAD)
def test_a_history_that_breaks_the_protocol(what: str, tmp_path: Path) -> None:
    *before, last = BAD[what]
    write(tmp_path, *before)
    history = History(tmp_path)
    write(tmp_path, last)
    with pytest.raises(BrokenPromise):
        history.read_on()


def test_a_history_tells_states_and_commits_over_an_emptied_ledger(tmp_path: Path) -> None:
    write(tmp_path, *GOOD["a ledger is emptied and recovered"])
    history = History(tmp_path)
    assert history.states("j") == ["validating", "in_progress", "validating", "in_progress"]
    assert history.commits("j") == {0: ["a", "a"], 1: ["c"]}


def test_a_history_waits_for_the_end_of_a_transaction(tmp_path: Path) -> None:
    """What a killed server left of one is cut off when it starts again: it never was."""
    write(tmp_path, *OPEN, ["MULTI"], owned(0, "a", 1), committed(0, "a"))
    path = next(tmp_path.glob("*/*.aof"))
    half = path.read_bytes()
    history = History(tmp_path)
    assert history.commits("j") == {}
    path.write_bytes(half[:-7])
    history.read_on()
    assert history.commits("j") == {}
    path.write_bytes(half)
    write(tmp_path, ["EXEC"])
    history.read_on()
    assert history.commits("j") == {0: ["a"]}


def test_files_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, ["SET", "a", "1"])
    later = tmp_path / "appendonlydir" / "appendonly.aof.10.incr.aof"
    next(tmp_path.glob("*/*.aof")).rename(later)
    write(tmp_path, ["SET", "a", "0"])
    assert [command[-1] for command in commands(tmp_path)] == ["0", "1"]
