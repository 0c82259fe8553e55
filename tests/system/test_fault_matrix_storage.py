"""The fault matrix, third part: the object store slows down, goes away, loses answers, and objects change behind us.

Every test: inject one fault, see that it came, and the checker finds every row once, in order, with its own answer.
What takes minutes by default is scaled: a lease lives for two seconds, a sweep comes twice a second.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from jobs.storage.s3_object import split_url
from tests.jobs.ledgers import key
from tests.proxy import tcp_proxy
from tests.s3_faults import FaultyApp, FaultyS3, faulty_s3
from tests.servers import BUCKET, ValkeyServer, rclone_s3
from tests.system.fleet import END_S, LEASE_TTL, SHARD_ROWS, Fleet, Job, Process
from tests.system.fleet import fleet as new_fleet
from tests.system.mill import wait_until

SEED = 20
STEP_S = 0.15
ENDPOINT = "PAGEMILL_S3_ENDPOINT_URL"


@pytest.fixture(scope="module")
def moto() -> Iterator[FaultyS3]:
    with faulty_s3(SEED) as found:
        yield found


@pytest.fixture
def app(moto: FaultyS3) -> FaultyApp:
    moto.app.requests.clear()
    return moto.app


@pytest.fixture
def bucket(tmp_path: Path, own_valkey: ValkeyServer, moto: FaultyS3) -> Iterator[Fleet]:
    """A fleet whose input, segments and results are in a bucket of Moto's."""
    storage = f"s3://{BUCKET}/{uuid4().hex}"
    with new_fleet(tmp_path / "fleet", own_valkey, s3=moto.server, storage=storage) as found:
        yield found


@pytest.fixture
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, own_valkey: ValkeyServer) -> Iterator[Fleet]:
    """A fleet with the store that the parameter names."""
    with ExitStack() as stack:
        match request.param:
            case "folder":
                places = {}
            case "moto":
                places = {"s3": request.getfixturevalue("moto").server, "storage": f"s3://{BUCKET}/{uuid4().hex}"}
            case _:
                server = stack.enter_context(rclone_s3(tmp_path / "rclone"))
                places = {"s3": server, "storage": f"s3://{BUCKET}/mill"}
        yield stack.enter_context(new_fleet(tmp_path / "fleet", own_valkey, **places))


def all_tried_once(fleet: Fleet, job: Job) -> bool:
    return set(fleet.tries(job).values()) == {1} and fleet.leases_given(job) == len(fleet.tries(job))


def path_of(url: str) -> str:
    return "/" + "/".join(split_url(url))


# --- 17 and 18: slow, and away ----------------------------------------------------------------------------------------


def test_17_the_store_says_slow_down_to_three_requests_in_ten(bucket: Fleet, app: FaultyApp) -> None:
    """For the length of a job, not for a minute."""
    job = bucket.submit(16)
    with app.slowing_down(0.3):
        bucket.control()
        bucket.worker()
        bucket.wait_for_end(job)
    bucket.finished(job)
    assert all_tried_once(bucket, job)
    assert len([request for request in app.requests if request.status == 503]) > 2
    app.requests.clear()
    job = bucket.submit()
    bucket.finished(job)
    asked = [request for request in app.requests if "/att/" in request.path and request.method == "PUT"]
    assert len(asked) == len(set(asked)) == 2 * len(bucket.tries(job)), "what is well is asked for once"


def test_18_answers_are_kept_while_the_store_is_away(bucket: Fleet, app: FaultyApp) -> None:
    """For longer than two lives of a lease, not for ten minutes."""
    bucket.control()
    with tcp_proxy(bucket.s3.endpoint) as proxy:
        worker = bucket.worker("segment.begun:stop", slots=1, **{ENDPOINT: proxy.endpoint})
        job = bucket.submit()
        worker.wait_until_stopped()
        ((shard, attempt),) = bucket.owners(job).items()
        with proxy.refusing():
            expiry = lease_expiry(bucket, job, shard)
            worker.send(signal.SIGCONT)
            wait_until(lambda: lease_expiry(bucket, job, shard) > expiry + 2 * LEASE_TTL, END_S, "a lease that is kept")
            assert proxy.connections_refused
            assert not app.statuses("PUT", f"{attempt}.jsonl")
        manifest = bucket.finished(job)
    assert manifest.segments[shard].record.attempt == attempt
    assert all_tried_once(bucket, job), "an answer was made twice"


def lease_expiry(fleet: Fleet, job: Job, shard: int) -> float:
    """In seconds by the server's clock; 0 if nobody has the shard."""
    return float(fleet.ledger.client.zscore(key(job.id, "leases"), shard) or 0) / 1000


# --- 19 to 21: the manifest -------------------------------------------------------------------------------------------


def test_19_the_reply_to_the_manifest_is_lost(bucket: Fleet, app: FaultyApp) -> None:
    with tcp_proxy(bucket.s3.endpoint) as proxy:
        proxy.drop_reply_to(b'"spec_fingerprint"')
        assembler = bucket.control(**{ENDPOINT: proxy.endpoint})
        bucket.worker()
        job = bucket.submit()
        bucket.finished(job)
        assert proxy.replies_dropped == 1
    assert app.statuses("PUT", "/manifest.json") == [200, 412]
    assert "cannot be assembled" not in assembler.log.read_text(), "its own manifest was taken for another's"


def take_lock(fleet: Fleet, job: Job) -> None:
    """As if its minute were over while its holder stands still."""
    assert fleet.ledger.client.delete(key(job.id, "lock:fin")) == 1


def frozen_assembler(fleet: Fleet, point: str) -> tuple[Process, Job]:
    """A control worker that is stopped at a point of the assembly, and will be again when it has told the ledger."""
    assembler = fleet.control(f"{point}:stop,job.finished:stop")
    fleet.worker()
    job = fleet.submit()
    assembler.wait_until_stopped()
    return assembler, job


def thaw(assembler: Process) -> None:
    """Until it has told the ledger that the job is done."""
    assembler.send(signal.SIGCONT)
    assembler.wait_until_stopped()


@pytest.mark.parametrize(
    ("anywhere", "point"),
    [("folder", "job.joined"), ("moto", "job.joined"), ("moto", "job.published"), ("rclone", "job.joined")],
    indirect=["anywhere"],
)
def test_20_two_assemble_at_once(anywhere: Fleet, point: str) -> None:
    """21 too: rclone does not know `If-None-Match`."""
    assembler, job = frozen_assembler(anywhere, point)
    take_lock(anywhere, job)
    anywhere.control()
    manifest = anywhere.finished(job)
    thaw(assembler)
    assert anywhere.finished(job) == manifest
    assert anywhere.history.states(job.id).count("completed") == 1


@pytest.mark.parametrize("anywhere", ["rclone"], indirect=True)
def test_21_another_manifest_comes_between_the_look_and_the_write(anywhere: Fleet) -> None:
    """The store takes both, and the later one replaces the first. They say the same."""
    with tcp_proxy(anywhere.s3.endpoint) as proxy:
        late = anywhere.control(**{ENDPOINT: proxy.endpoint})
        job = anywhere.prepare()
        with proxy.holding(f"PUT {path_of(job.spec.layout.manifest)}".encode()) as came:
            anywhere.worker()
            anywhere.enter(job)
            assert came.wait(END_S)
            second = int(time.time())
            wait_until(lambda: int(time.time()) > second, END_S, "another second, which is what manifests tell apart")
            take_lock(anywhere, job)
            manifest = anywhere.finished(job)
        late.wait_for_line("another process may have done the same (fin)")
        assert anywhere.finished(job) == manifest


# --- 22: objects that are gone, or others -----------------------------------------------------------------------------


@pytest.mark.parametrize("anywhere", ["folder", "moto"], indirect=True)
def test_22_segments_are_deleted_cut_and_replaced_before_they_are_joined(anywhere: Fleet) -> None:
    planner = anywhere.control()
    worker = anywhere.worker(step_s=2 * STEP_S)
    job = anywhere.submit()
    anywhere.wait_for(job, lambda view: view.settled, "a commit")
    planner.kill()
    anywhere.wait_for(job, lambda view: view.state == "finalizing", "all shards")
    hurt = {}
    for shard, record in anywhere.ledger.records(job.id).items():
        output, _ = record.objects(job.spec.layout, shard)
        data = anywhere.stores.read(output.url)
        hurt[output.url] = [None, data[:-1], data.replace(b"answer", b"reply!"), data][min(shard, 3)]
    for url, data in hurt.items():
        if data is None:
            anywhere.stores.delete([url])
        elif data != anywhere.stores.read(url):
            anywhere.stores.put(url, data)
    anywhere.control()
    anywhere.finished(job)
    tried = {shard: len(attempts) for shard, attempts in anywhere.history.commits(job.id).items()}
    assert tried == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert worker.alive


def test_22_a_listing_that_comes_late_costs_work_and_nothing_else(bucket: Fleet, app: FaultyApp) -> None:
    """`recover` takes over what a listing shows; what it does not show is made again."""
    bucket.control()
    bucket.worker(step_s=STEP_S)
    job = bucket.submit(10 * SHARD_ROWS)
    bucket.wait_for(job, lambda view: view.settled > 2, "commits")
    shown = bucket.ledger.records(job.id)
    with app.listing_late(rb"/att/00000[01]/"):
        bucket.roll_back(None)
        assert bucket.recover() == [job.id]
        bucket.finished(job)
    assert app.entries_hidden >= 4
    again = bucket.tries(job).keys()
    assert {0, 1} <= again
    assert not (shown.keys() - {0, 1}) & again


# --- 23 and 24: the input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anywhere", ["folder", "moto"], indirect=True)
def test_23_the_input_is_overwritten_while_its_job_runs(anywhere: Fleet) -> None:
    """By other rows of the same size: what is done already is not mixed with them."""
    anywhere.control()
    worker = anywhere.worker("lease.taken:stop@2", slots=1)
    job = anywhere.submit()
    worker.wait_until_stopped()
    assert anywhere.view(job).settled == 1
    overwrite_input(anywhere, job)
    worker.send(signal.SIGCONT)
    view = anywhere.wait_for_end(job, "failed")
    assert [error.code for error in view.errors] == ["input_changed"]
    assert not anywhere.has_result(job)
    assert worker.alive


@pytest.mark.parametrize("anywhere", ["folder", "moto"], indirect=True)
def test_23_the_input_is_overwritten_before_its_job_is_planned(anywhere: Fleet) -> None:
    job = anywhere.submit()
    overwrite_input(anywhere, job)
    anywhere.control()
    view = anywhere.wait_for_end(job, "failed")
    assert [error.code for error in view.errors] == ["input_changed"]
    assert not anywhere.has_result(job)


def overwrite_input(fleet: Fleet, job: Job) -> None:
    url = job.spec.input.files[0].url
    data = fleet.stores.read(url)
    other = data.replace(b"question", b"quotient")
    assert other != data
    fleet.stores.put(url, other)


@pytest.mark.parametrize("seed", [1, 2])
def test_24_reads_are_cut_at_random(seed: int, bucket: Fleet) -> None:
    prompts = [f"question {n} {'lorem ipsum ' * 300}" for n in range(48)]
    with tcp_proxy(bucket.s3.endpoint) as proxy, proxy.cutting_reads(0.2, seed):
        bucket.control(**{ENDPOINT: proxy.endpoint})
        bucket.worker(**{ENDPOINT: proxy.endpoint})
        job = bucket.submit(prompts=prompts)
        bucket.finished(job)
        assert proxy.connections_cut > 2
    assert all_tried_once(bucket, job)
