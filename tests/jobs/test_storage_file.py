"""What is particular to files: names, folders, and how little a join holds in memory."""

import tracemalloc
from pathlib import Path

import pytest

from jobs.errors import ObjectNotFound, StorageError, UsageError
from jobs.storage import FileStore
from jobs.storage.base import CHUNK, MIB


def test_a_url_and_a_path_are_the_same_file(tmp_path: Path) -> None:
    store = FileStore()
    store.put(f"file://{tmp_path}/a b%20c.jsonl", b"x")
    assert (tmp_path / "a b%20c.jsonl").read_bytes() == b"x"
    assert store.read(str(tmp_path / "a b%20c.jsonl")) == b"x"
    assert store.head(f"file://localhost{tmp_path}/a b%20c.jsonl").size == 1


def test_a_relative_path_is_read_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FileStore().put("in.jsonl", b"x")
    FileStore().put("in/deep.jsonl", b"x")
    assert (tmp_path / "in.jsonl").exists()
    assert [info.url for info in FileStore().list("in")] == ["in.jsonl", "in/deep.jsonl"]


def test_a_url_of_another_host_is_refused() -> None:
    with pytest.raises(UsageError, match="file URL"):
        FileStore().head("file://elsewhere/x")


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="folder"):
        FileStore().head(str(tmp_path))
    with pytest.raises(StorageError, match="folder"):
        FileStore().read(str(tmp_path))
    with pytest.raises(StorageError):
        FileStore().put(str(tmp_path), b"x")
    with pytest.raises(StorageError, match="folder"):
        FileStore().delete([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_path_through_a_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectNotFound, match="file/below"):
        FileStore().read(f"{tmp_path}/file/below")
    with pytest.raises(StorageError, match="file/below"):
        FileStore().put(f"{tmp_path}/file/below", b"x")


def test_two_writes_in_one_clock_tick_have_different_etags(tmp_path: Path) -> None:
    store = FileStore()
    etags = {store.put(str(tmp_path / "x"), b"%04d" % number).etag for number in range(50)}
    assert len(etags) == 50


def test_an_unfinished_write_is_in_no_listing(tmp_path: Path) -> None:
    store = FileStore()
    with store.writer(str(tmp_path / "x")) as writer:
        writer.write(b"x")
        assert list(store.list(f"{tmp_path}/")) == []
    assert [info.size for info in store.list(f"{tmp_path}/")] == [1]


def test_a_file_cut_short_under_a_stream_is_no_short_result(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 3000)
    stream = FileStore().stream(str(path), chunk=1000)
    next(stream)
    with path.open("r+b") as file:
        file.truncate(1500)
    with pytest.raises(StorageError, match="changed"):
        list(stream)


def test_a_join_holds_one_chunk_at_a_time(tmp_path: Path) -> None:
    store = FileStore()
    sources = [store.put(str(tmp_path / str(number)), bytes(32 * MIB)) for number in range(3)]
    tracemalloc.start()
    try:
        store.concat(sources, str(tmp_path / "joined"))
        assert tracemalloc.get_traced_memory()[1] < 2.5 * CHUNK
    finally:
        tracemalloc.stop()
    assert store.head(str(tmp_path / "joined")).size == 96 * MIB
