"""Rows are seen as their shards are settled, in the order of the input, each once; and all of them by the end."""

import json
import os
import signal
import subprocess
import sys
from queue import SimpleQueue
from threading import Thread

import pytest

from jobs.errors import EXIT_JOB_FAILED, EXIT_ROWS_FAILED
from jobs.follow import follow_results
from jobs.ledger import Lease
from jobs.output import Output
from jobs.records import SegmentRecord
from jobs.spec import JobSpec
from tests.jobs.commands import Command
from tests.jobs.site import Site
from tests.servers import ValkeyServer

MIXED = [{"prompt": f"question {n}"} if n % 5 else {"text": n} for n in range(10)]


class Reader:
    """Follows a job in steps: `rows` is what came until the job had nothing more to give, or had ended."""

    def __init__(self, site: Site, spec: JobSpec) -> None:
        self._waiting = False
        self._pieces = follow_results(spec, site.ledger, site.stores, self._wait)
        self._read: SimpleQueue[bytes | None] = SimpleQueue()
        self._go: SimpleQueue[None] = SimpleQueue()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._read.put(None)
        self._go.get(timeout=20)

    def _run(self) -> None:
        for piece in self._pieces:
            self._read.put(piece)
        self._read.put(None)

    def rows(self) -> bytes:
        if self._waiting:
            self._go.put(None)
        found = []
        while (piece := self._read.get(timeout=20)) is not None:
            found.append(piece)
        self._waiting = True
        return b"".join(found)

    def ended(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()


def committed(site: Site, lease: Lease | None) -> bytes:
    """What the lease's segment adds to the output."""
    assert lease is not None
    record = site.segment(lease)
    assert site.ledger.commit(lease, record) == "ok"
    output, _ = record.objects(lease.spec.layout, lease.shard.index)
    assert output is not None
    return site.stores.read(output.url)


def test_a_shard_is_seen_when_all_before_it_are_settled(any_site: Site) -> None:
    spec = any_site.submit(MIXED)
    reader = Reader(any_site, spec)
    assert reader.rows() == b""
    any_site.control.plan(spec.id)
    first, second, third = (any_site.lease(spec) for _ in range(3))
    assert reader.rows() == b""
    later = committed(any_site, second)
    assert reader.rows() == b""
    sooner = committed(any_site, first)
    assert reader.rows() == sooner + later
    last = committed(any_site, third)
    assert reader.rows() == last
    any_site.control.assemble(spec.id)
    assert reader.rows() == b""
    assert reader.ended()
    assert any_site.stores.read(spec.output_url) == sooner + later + last


@pytest.mark.parametrize("form", [Output(compression="gzip"), Output(compression="zstd"), Output(format="parquet")])
def test_segments_of_every_form_are_seen_as_lines(site: Site, form: Output) -> None:
    spec = site.planned(10, output=form)
    site.work(spec)
    site.control.assemble(spec.id)
    lines = b"".join(follow_results(spec, site.ledger, site.stores, pytest.fail)).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [f"question {n}" for n in range(10)]


def test_a_dead_shard_and_what_comes_after_it_are_seen_at_the_end(site: Site) -> None:
    spec = site.planned(10, max_tries=1)
    dead = site.lease(spec)
    assert dead is not None
    site.ledger.release(dead, "burnt")
    rest = committed(site, site.lease(spec)) + committed(site, site.lease(spec))
    assert site.lease(spec) is None
    reader = Reader(site, spec)
    assert reader.rows() == b""
    site.control.assemble(spec.id)
    rows = reader.rows()
    assert rows == site.stores.read(spec.output_url)
    assert rows.endswith(rest)
    assert reader.ended()


def test_a_cancelled_job_gives_what_it_has(site: Site) -> None:
    spec = site.planned(12)
    leases = [site.lease(spec) for _ in range(3)]
    kept = committed(site, leases[0])
    beyond = committed(site, leases[2])
    reader = Reader(site, spec)
    assert reader.rows() == kept
    site.ledger.cancel(spec.id)
    site.control.assemble(spec.id)
    assert reader.rows() == beyond
    assert reader.ended()


def test_a_segment_that_has_vanished_is_waited_for(site: Site) -> None:
    spec = site.planned(4)
    site.work(spec)
    record = site.ledger.record(spec.id, 0)
    assert isinstance(record, SegmentRecord)
    site.stores.delete([part.url for part in record.objects(spec.layout, 0) if part])
    reader = Reader(site, spec)
    assert reader.rows() == b""
    site.control.assemble(spec.id)
    again = committed(site, site.lease(spec))
    site.control.assemble(spec.id)
    assert reader.rows() == again
    assert reader.ended()


def test_pieces_end_where_lines_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.follow._CHUNK", 7)
    spec = site.planned(10)
    site.work(spec)
    site.control.assemble(spec.id)
    pieces = list(follow_results(spec, site.ledger, site.stores, pytest.fail))
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == site.stores.read(spec.output_url)


def test_the_command_ends_with_the_job_s_exit_code(site: Site, pagemill: Command) -> None:
    spec = site.submit(MIXED)
    site.control.plan(spec.id)
    site.work(spec)
    site.control.assemble(spec.id)
    done = pagemill("results", spec.id, "--follow", "--json")
    assert (done.code, done.out.encode()) == (EXIT_ROWS_FAILED, site.stores.read(spec.output_url))
    failed = site.submit(MIXED, on_bad_row="fail")
    site.control.plan(failed.id)
    done = pagemill("results", failed.id, "--follow")
    assert (done.code, done.out) == (EXIT_JOB_FAILED, "")
    assert "Missing required column" in done.err
    assert pagemill("results", spec.id, "--follow", "-o", "x").code == 2


def following(site: Site, spec: JobSpec, valkey: ValkeyServer) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **valkey.environment(), "PAGEMILL_STORAGE": site.settings.storage_url}
    command = [sys.executable, "-m", "jobs.cli", "results", spec.id, "--follow"]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_interrupts
    )


def _hear_interrupts() -> None:
    """Who starts the tests in the background may have them, and their children, ignore these."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_ends_it_without_a_word(site: Site, valkey: ValkeyServer) -> None:
    spec = site.planned(8)
    lines = committed(site, site.lease(spec))
    with following(site, spec, valkey) as process:
        assert process.stdout is not None
        read = b"".join(process.stdout.readline() for _ in range(4))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, read + out, err) == (130, lines, b"")


def test_a_reader_that_has_enough_ends_it_without_a_word(site: Site, valkey: ValkeyServer) -> None:
    spec = site.planned(8)
    leases = [site.lease(spec) for _ in range(2)]
    committed(site, leases[0])
    with following(site, spec, valkey) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        committed(site, leases[1])
        assert (process.wait(30), process.stderr.read()) == (0, b"")
