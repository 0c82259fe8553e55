"""Objects as files: `file:///path` (taken literally, without percent decoding) and plain paths.

An object is written under a temporary name in its own folder, synced, and renamed into place, so that no reader and
no crash ever shows a part of it.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from jobs.errors import ObjectNotFound, PreconditionFailed, StorageError, UsageError
from jobs.storage.base import (
    CHUNK,
    ObjectInfo,
    ObjectWriter,
    StoredObject,
    UnfinishedWrite,
    refuse_parent_segments,
    stream_into,
)

_TEMPORARY = ".pagemill-tmp-"
_READ_SIZE = 1 << 20


def path_of(url: str) -> Path:
    """The path behind a file URL or a plain path. Raises UsageError where it names another host or holds `..`."""
    refuse_parent_segments(url)
    if not url.startswith("file://"):
        return Path(url)
    path = url.removeprefix("file://").removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(f"{url!r} is not a file URL of this machine.", hint="Write file:///absolute/path.")
    return Path(path)


def _url_like(prefix_url: str, path: str) -> str:
    return f"file://{path}" if prefix_url.startswith("file://") else path


def _info(url: str, status: os.stat_result) -> ObjectInfo:
    # The inode tells apart two writes of the same size within one tick of the file system's clock.
    return ObjectInfo(url, status.st_size, f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}")


@contextmanager
def explained(url: str, verb: str) -> Iterator[None]:
    """Turns the system's errors into ObjectNotFound or StorageError about that file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFound(f"There is no file {url}.") from error
    except IsADirectoryError as error:
        raise StorageError(f"{url} is a folder, not a file.") from error
    except PermissionError as error:
        raise StorageError(
            f"Could not {verb} {url}: permission denied.", hint="Check the owner and mode of the file and its folder."
        ) from error
    except OSError as error:
        hint = "Free some space, or write elsewhere." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(f"Could not {verb} {url}: {os.strerror(error.errno or 0)}.", hint=hint) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _FileWriter:
    """Writes beside the target and renames over it on a clean exit; with `absent`, only where nothing is there yet."""

    info: ObjectInfo

    def __init__(self, url: str, *, absent: bool = False) -> None:
        self._url = url
        self._absent = absent
        self._target = path_of(url)
        self._temporary = self._target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        with explained(url, "write"):
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary.open("xb")

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes) -> None:
        with explained(self._url, "write"):
            self._file.write(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            # A buffered write that failed once would fail again here; the first error is the one to show.
            with suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Flush, sync, rename, sync the folder: a crash between any two leaves the old object or the new one."""
        with explained(self._url, "write"):
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._absent:
                self._link()
            else:
                self._temporary.replace(self._target)
            _sync_folder(self._target.parent)
            self.info = _info(self._url, os.fstat(self._file.fileno()))

    def _link(self) -> None:
        try:
            os.link(self._temporary, self._target)
        except FileExistsError as error:
            raise PreconditionFailed(f"{self._url} exists already.") from error


class FileStore:
    """A `Store` on a file system that has atomic renames and hard links."""

    def head(self, url: str) -> ObjectInfo:
        with explained(url, "read"):
            status = path_of(url).stat()
        if stat.S_ISDIR(status.st_mode):
            raise ObjectNotFound(f"{url} is a folder, not a file.")
        return _info(url, status)

    def read(self, url: str, start: int = 0, end: int | None = None, etag: str | None = None) -> bytes:
        return b"".join(self.stream(url, start, end, etag))

    def stream(
        self, url: str, start: int = 0, end: int | None = None, etag: str | None = None, chunk: int = CHUNK
    ) -> Iterator[bytes]:
        with explained(url, "read"), path_of(url).open("rb", buffering=0) as file:
            seen = _info(url, os.fstat(file.fileno()))
            if etag is not None and seen.etag != etag:
                raise PreconditionFailed(f"{url} is not the version that was asked for: it has changed since.")
            file.seek(start)
            left = (seen.size if end is None else min(end, seen.size)) - start
            while left > 0:
                piece = file.read(min(chunk, left, _READ_SIZE))
                if not piece or _info(url, os.fstat(file.fileno())) != seen:
                    raise PreconditionFailed(f"{url} changed while it was read.")
                left -= len(piece)
                yield piece

    def put(self, url: str, data: bytes) -> ObjectInfo:
        with self.writer(url) as writer:
            writer.write(data)
        return writer.info

    def put_file(self, url: str, path: Path) -> ObjectInfo:
        with explained(str(path), "read"), path.open("rb") as source, self.writer(url) as writer:
            shutil.copyfileobj(source, writer, CHUNK)
        return writer.info

    def put_if_absent(self, url: str, data: bytes) -> ObjectInfo:
        writer = _FileWriter(url, absent=True)
        try:
            with writer:
                writer.write(data)
        except PreconditionFailed:
            there = self.head(url)
            if there.size == len(data) and self.read(url, etag=there.etag) == data:
                return there
            raise
        return writer.info

    def supports_conditional_put(self, url: str) -> bool:
        return True

    def writer(self, url: str, size: int | None = None) -> ObjectWriter:
        return _FileWriter(url)

    def check_writable(self, url: str) -> None:
        path = path_of(url)
        if path.is_dir():
            raise UsageError(f"The output {path} is a folder.", hint="Name a file in it.")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UsageError(f"The output {path} cannot be written: {folder} is no folder that can be written to.")

    def concat(self, sources: Sequence[ObjectInfo], url: str) -> ObjectInfo:
        return stream_into(self, sources, self.writer(url))

    def list(self, prefix_url: str) -> Iterator[ObjectInfo]:
        for url, status in self._files(prefix_url):
            yield _info(url, status)

    def _files(self, prefix_url: str, *, temporary: bool = False) -> Iterator[tuple[str, os.stat_result]]:
        prefix = str(path_of(prefix_url)) + ("/" if prefix_url.endswith("/") else "")
        with explained(prefix_url, "list"):
            for path in _walk(os.path.dirname(prefix), prefix, temporary):
                # A file that goes away between the walk and the look is not in the listing.
                with suppress(FileNotFoundError):
                    yield _url_like(prefix_url, path), os.stat(path)

    def folders(self, prefix_url: str) -> Iterator[str]:
        with explained(prefix_url, "list"), suppress(FileNotFoundError), os.scandir(path_of(prefix_url)) as entries:
            yield from sorted((e.name for e in entries if e.is_dir(follow_symlinks=False)), key=os.fsencode)

    def stored(self, prefix_url: str) -> Iterator[StoredObject]:
        for url, status in self._files(prefix_url):
            yield StoredObject(url, status.st_size, status.st_mtime)

    def unfinished(self, prefix_url: str) -> Iterator[UnfinishedWrite]:
        for url, status in self._files(prefix_url, temporary=True):
            yield UnfinishedWrite(url, status.st_size, status.st_mtime)

    def discard(self, write: UnfinishedWrite) -> None:
        self.delete([write.url])

    def delete(self, urls: Iterable[str]) -> None:
        for url in urls:
            with suppress(ObjectNotFound), explained(url, "delete"):
                path_of(url).unlink()


def _walk(folder: str, prefix: str, temporary: bool) -> Iterator[str]:
    """Files under `folder` whose path starts with `prefix`, in byte order. Links to folders are not followed.

    They are those of unfinished writes, or all others.
    """
    try:
        with os.scandir(folder or ".") as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False), entry.is_file()) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    # With the slash that follows a folder's name in its files' paths, names sort as those paths do.
    for name, is_folder, is_file in sorted(found, key=lambda entry: os.fsencode(entry[0] + "/" * entry[1])):
        path = os.path.join(folder, name)
        if not path.startswith(prefix):
            continue
        if is_folder:
            yield from _walk(path, prefix, temporary)
        elif is_file and name.startswith(_TEMPORARY) == temporary:
            yield path
