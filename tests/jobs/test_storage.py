"""The contract of a store, held by files, by an S3 with all the features and by an S3 that lacks some."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.errors import ObjectNotFound, PreconditionFailed, UsageError
from jobs.settings import Settings
from jobs.storage import ObjectWriter, Stores, open_store
from jobs.storage.base import MIB
from tests.servers import BUCKET, S3Server


@dataclass(frozen=True)
class Place:
    """A fresh, empty prefix in one kind of store, and all stores."""

    kind: str
    base: str
    stores: Stores
    leftovers: Callable[[], list[str]]
    """What an unfinished write has left behind: multipart uploads or temporary files."""

    def url(self, name: str) -> str:
        return f"{self.base}/{name}"


def _s3_place(kind: str, server: S3Server) -> Place:
    prefix = uuid.uuid4().hex

    def uploads() -> list[str]:
        client = server.client()
        try:
            found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        except client.exceptions.NoSuchUpload:  # rclone's way to say that there is none
            return []
        return [upload["Key"] for upload in found if upload["Key"].startswith(prefix)]

    return Place(kind, f"s3://{BUCKET}/{prefix}", Stores(server.settings()), uploads)


@pytest.fixture(params=["file", "path", "moto", "rclone"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    if kind in ("file", "path"):
        base = f"file://{tmp_path}/store" if kind == "file" else f"{tmp_path}/store"
        return Place(kind, base, Stores(Settings()), lambda: [str(p) for p in tmp_path.rglob("*tmp*") if p.is_file()])
    return _s3_place(kind, request.getfixturevalue(f"{kind}_s3"))


def test_an_object_reads_back_as_it_was_put(place: Place) -> None:
    url = place.url("a/b.bin")
    info = place.stores.put(url, b"hello")
    assert info == place.stores.head(url)
    assert (info.url, info.size) == (url, 5)
    assert place.stores.read(url) == b"hello"
    assert place.stores.read(url, etag=info.etag) == b"hello"


def test_an_empty_object_is_an_object(place: Place) -> None:
    url = place.url("empty")
    assert place.stores.put(url, b"").size == 0
    assert place.stores.read(url) == b""
    assert list(place.stores.stream(url)) == []


@pytest.mark.parametrize(("start", "end"), [(0, 3), (3, 7), (7, None), (0, 99), (10, None), (12, 20), (4, 4)])
def test_a_range_reads_like_a_slice(place: Place, start: int, end: int | None) -> None:
    place.stores.put(place.url("x"), b"0123456789")
    assert place.stores.read(place.url("x"), start, end) == b"0123456789"[start:end]


def test_a_missing_object_is_not_found(place: Place) -> None:
    for access in (place.stores.head, place.stores.read, lambda url: list(place.stores.stream(url))):
        with pytest.raises(ObjectNotFound, match="nothing"):
            access(place.url("nothing"))


def test_a_stream_comes_in_pieces_of_at_most_a_chunk(place: Place) -> None:
    data = bytes(range(256)) * 40
    place.stores.put(place.url("x"), data)
    pieces = list(place.stores.stream(place.url("x"), 5, 10_000, chunk=1000))
    assert b"".join(pieces) == data[5:10_000]
    assert max(map(len, pieces)) <= 1000


def test_a_new_version_is_not_read_as_the_old_one(place: Place) -> None:
    url = place.url("x")
    old = place.stores.put(url, b"old")
    new = place.stores.put(url, b"new")
    assert old.etag != new.etag
    with pytest.raises(PreconditionFailed):
        place.stores.read(url, etag=old.etag)


@pytest.mark.parametrize("size", [3, 50, 100])
def test_a_range_of_a_version_that_is_gone_is_no_range_of_the_new_one(place: Place, size: int) -> None:
    url = place.url("x")
    old = place.stores.put(url, b"a" * 99)
    place.stores.put(url, b"b" * size)
    with pytest.raises(PreconditionFailed):
        place.stores.read(url, 40, 99, old.etag)


def test_a_range_of_a_version_that_is_there_is_read(place: Place) -> None:
    info = place.stores.put(place.url("x"), b"0123456789")
    for start, end in [(0, 10), (3, 7), (9, 10), (4, 4)]:
        assert place.stores.read(info.url, start, end, info.etag) == b"0123456789"[start:end]


def test_an_object_that_changes_under_a_stream_ends_it(place: Place) -> None:
    url = place.url("x")
    place.stores.put(url, b"a" * 5000)
    stream = place.stores.stream(url, chunk=1000)
    assert next(stream) == b"a" * 1000
    place.stores.put(url, b"b" * 5000)
    seen = []
    try:
        seen.extend(stream)
    except PreconditionFailed:
        return
    # A file that is still open is the old version to its end; nothing else may be.
    assert place.kind in ("file", "path")
    assert b"".join(seen) == b"a" * 4000


def test_a_file_is_put_whole(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100_000)
    assert place.stores.put_file(place.url("copy"), source).size == 100_000
    assert place.stores.read(place.url("copy")) == source.read_bytes()


def test_a_local_file_that_is_missing_is_named(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="no-such-file"):
        place.stores.put_file(place.url("copy"), tmp_path / "no-such-file")


def test_a_writer_publishes_on_a_clean_exit(place: Place) -> None:
    url = place.url("x")
    with place.stores.writer(url) as writer:
        writer.write(b"one ")
        writer.write(b"two")
        with pytest.raises(ObjectNotFound):
            place.stores.head(url)
    assert writer.info == place.stores.head(url)
    assert place.stores.read(url) == b"one two"


def _write_and_break_off(writer: ObjectWriter, data: bytes) -> None:
    with writer:
        writer.write(data)
        raise KeyboardInterrupt


@pytest.mark.parametrize("size", [10, 20 * MIB])
def test_a_writer_whose_block_raises_leaves_nothing(place: Place, size: int) -> None:
    url = place.url("x")
    with pytest.raises(KeyboardInterrupt):
        _write_and_break_off(place.stores.writer(url, size), b"x" * size)
    with pytest.raises(ObjectNotFound):
        place.stores.head(url)
    assert place.leftovers() == []


def test_a_large_object_goes_in_parts_and_reads_back(place: Place) -> None:
    data = uuid.uuid4().bytes * (18 * MIB // 16)
    with place.stores.writer(place.url("large"), len(data)) as writer:
        for start in range(0, len(data), 5 * MIB):
            writer.write(data[start : start + 5 * MIB])
    assert writer.info.size == len(data)
    assert place.stores.read(place.url("large"), etag=writer.info.etag) == data
    assert place.leftovers() == []


def test_only_an_absent_object_is_created(place: Place) -> None:
    url = place.url("manifest")
    info = place.stores.put_if_absent(url, b"first")
    with pytest.raises(PreconditionFailed):
        place.stores.put_if_absent(url, b"other")
    assert place.stores.head(url) == info
    assert place.stores.read(url) == b"first"


def test_the_same_bytes_again_are_our_own_write(place: Place) -> None:
    url = place.url("manifest")
    info = place.stores.put_if_absent(url, b"mine")
    assert place.stores.put_if_absent(url, b"mine") == info


def test_of_many_creators_one_wins(place: Place) -> None:
    url = place.url("manifest")
    if not place.stores.supports_conditional_put(url):
        pytest.skip("this store has no conditional PUT: the ledger's lease is the guard there")
    start = list(range(8))

    def create(number: int) -> bool:
        try:
            place.stores.put_if_absent(url, b"%d" % number)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(create, start))
    assert won.count(True) == 1
    assert place.stores.read(url) == b"%d" % won.index(True)


def test_the_probe_finds_what_a_store_lacks(place: Place) -> None:
    assert place.stores.supports_conditional_put(place.url("x")) == (place.kind != "rclone")
    assert list(place.stores.list(place.base)) == []


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0, 0],
        [3, 0, 4],
        [6 * MIB, 5 * MIB, 0, 1],
        [6 * MIB, 1, 6 * MIB],
    ],
    ids=str,
)
def test_objects_are_joined_in_order(place: Place, sizes: list[int]) -> None:
    parts = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    sources = [place.stores.put(place.url(f"part-{n}"), part) for n, part in enumerate(parts)]
    info = place.stores.concat(sources, place.url("joined"))
    assert info == place.stores.head(place.url("joined"))
    assert place.stores.read(place.url("joined")) == b"".join(parts)
    assert place.leftovers() == []


@pytest.mark.parametrize("size", [3, 6 * MIB])
@pytest.mark.parametrize("fate", ["changed", "gone"])
def test_a_source_that_is_not_what_it_was_is_not_joined(place: Place, size: int, fate: str) -> None:
    first = place.stores.put(place.url("first"), b"a" * size)
    second = place.stores.put(place.url("second"), b"b" * size)
    if fate == "changed":
        place.stores.put(second.url, b"c" * size)
    else:
        place.stores.delete([second.url])
    with pytest.raises(PreconditionFailed if fate == "changed" else ObjectNotFound):
        place.stores.concat([first, second], place.url("joined"))
    with pytest.raises(ObjectNotFound):
        place.stores.head(place.url("joined"))
    assert place.leftovers() == []


def test_objects_of_different_stores_are_joined(place: Place, tmp_path: Path) -> None:
    here = place.stores.put(place.url("here"), b"here ")
    there = place.stores.put(f"file://{tmp_path}/elsewhere/there", b"there")
    for target in (place.url("joined"), f"file://{tmp_path}/elsewhere/joined"):
        assert place.stores.concat([here, there], target).size == 10
        assert place.stores.read(target) == b"here there"


def test_a_listing_is_by_prefix_and_in_order(place: Place) -> None:
    names = ["a/1", "a/2", "a-b/1", "a.txt", "ab", "b/1", "ü"]
    infos = {place.url(name): place.stores.put(place.url(name), name.encode()) for name in names}
    assert [info.url for info in place.stores.list(f"{place.base}/")] == sorted(infos, key=str.encode)
    assert list(place.stores.list(place.url("a/"))) == [infos[place.url("a/1")], infos[place.url("a/2")]]
    assert [info.url for info in place.stores.list(place.url("a"))] == sorted(u for u in infos if "/a" in u[-6:])
    assert list(place.stores.list(place.url("none/"))) == []


def test_deleting_is_for_all_that_is_there(place: Place) -> None:
    urls = [place.url(f"n/{number}") for number in range(5)]
    for url in urls[:4]:
        place.stores.put(url, b"x")
    place.stores.delete(urls[1:])
    assert [info.url for info in place.stores.list(place.url(""))] == urls[:1]
    place.stores.delete([])
    place.stores.delete([place.url("no/such/folder")])


@pytest.mark.parametrize("name", ["../up", "a/../../b", ".."])
def test_a_url_that_leads_upwards_is_refused(place: Place, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.\."):
        place.stores.put(place.url(name), b"x")


def test_threads_share_a_store(place: Place) -> None:
    def round_trip(number: int) -> bool:
        url = place.url(f"t/{number}")
        place.stores.put(url, b"%d" % number * 1000)
        return place.stores.read(url) == b"%d" % number * 1000

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(round_trip, range(32)))


def test_a_store_for_another_scheme_is_refused() -> None:
    with pytest.raises(UsageError, match="gs://"):
        open_store("gs://bucket/x", Settings())


def test_whether_an_object_could_be_written_is_found_out_without_writing_one(place: Place) -> None:
    place.stores.check_writable(place.url("new/out.jsonl"))
    assert list(place.stores.list(place.base)) == []
    assert place.leftovers() == []


def test_folders_are_named_once_each(place: Place) -> None:
    for name in ("a/1", "a/2", "b/deep/3", "c"):
        place.stores.put(place.url(name), b"x")
    assert list(place.stores.folders(f"{place.base}/")) == ["a", "b"]
    assert list(place.stores.folders(place.url("none/"))) == []
