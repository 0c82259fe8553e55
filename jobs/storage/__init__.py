"""Object storage by URL: `s3://bucket/key`, `file:///path` and plain paths."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from jobs.errors import UsageError
from jobs.settings import Settings
from jobs.storage.base import CHUNK, ObjectInfo, ObjectWriter, Store, StoredObject, UnfinishedWrite, stream_into
from jobs.storage.file import FileStore
from jobs.storage.s3 import S3Store, shared_s3_store
from jobs.storage.s3_object import S3Config

__all__ = [
    "FileStore",
    "ObjectInfo",
    "ObjectWriter",
    "S3Config",
    "S3Store",
    "Store",
    "StoredObject",
    "Stores",
    "UnfinishedWrite",
    "open_store",
]


def _scheme(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else "file"


def open_store(url: str, settings: Settings) -> Store:
    """The store that serves URLs like this one. Raises UsageError for a scheme that is not served.

    One S3 client is shared by all stores of a process with the same endpoint and credentials.
    """
    match _scheme(url):
        case "file":
            return FileStore()
        case "s3":
            return shared_s3_store(S3Config.from_settings(settings))
        case other:
            raise UsageError(
                f"There is no storage for {other}:// URLs ({url}).", hint="Use s3://bucket/key, file:///path or a path."
            )


class Stores:
    """All stores as one: every URL goes to the store of its scheme, and `concat` may cross from one to another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def at(self, url: str) -> Store:
        return open_store(url, self._settings)

    def head(self, url: str) -> ObjectInfo:
        return self.at(url).head(url)

    def read(self, url: str, start: int = 0, end: int | None = None, etag: str | None = None) -> bytes:
        return self.at(url).read(url, start, end, etag)

    def stream(
        self, url: str, start: int = 0, end: int | None = None, etag: str | None = None, chunk: int = CHUNK
    ) -> Iterator[bytes]:
        return self.at(url).stream(url, start, end, etag, chunk)

    def put(self, url: str, data: bytes) -> ObjectInfo:
        return self.at(url).put(url, data)

    def put_file(self, url: str, path: Path) -> ObjectInfo:
        return self.at(url).put_file(url, path)

    def put_if_absent(self, url: str, data: bytes) -> ObjectInfo:
        return self.at(url).put_if_absent(url, data)

    def supports_conditional_put(self, url: str) -> bool:
        return self.at(url).supports_conditional_put(url)

    def writer(self, url: str, size: int | None = None) -> ObjectWriter:
        return self.at(url).writer(url, size)

    def check_writable(self, url: str) -> None:
        self.at(url).check_writable(url)

    def concat(self, sources: Sequence[ObjectInfo], url: str) -> ObjectInfo:
        if all(_scheme(source.url) == _scheme(url) for source in sources):
            return self.at(url).concat(sources, url)
        return stream_into(self, sources, self.writer(url, sum(source.size for source in sources)))

    def list(self, prefix_url: str) -> Iterator[ObjectInfo]:
        return self.at(prefix_url).list(prefix_url)

    def folders(self, prefix_url: str) -> Iterator[str]:
        return self.at(prefix_url).folders(prefix_url)

    def stored(self, prefix_url: str) -> Iterator[StoredObject]:
        return self.at(prefix_url).stored(prefix_url)

    def unfinished(self, prefix_url: str) -> Iterator[UnfinishedWrite]:
        return self.at(prefix_url).unfinished(prefix_url)

    def discard(self, write: UnfinishedWrite) -> None:
        self.at(write.url).discard(write)

    def delete(self, urls: Iterable[str]) -> None:
        for scheme, group in groupby(urls, _scheme):
            self.at(f"{scheme}://").delete(group)
