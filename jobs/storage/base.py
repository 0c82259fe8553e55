"""What a store of objects can do, whichever kind it is."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from jobs.errors import UsageError

MIB = 1024 * 1024
CHUNK = 8 * MIB


class ObjectInfo(NamedTuple):
    """One object as it was seen: `size` in bytes, and an `etag` that differs once the content has changed."""

    url: str
    size: int
    etag: str


class StoredObject(NamedTuple):
    """An object in a listing, with its size in bytes and when it was written, in Unix seconds."""

    url: str
    size: int
    modified: float


class UnfinishedWrite(NamedTuple):
    """What a write that never came to its end holds: `upload` names a multipart upload, and is empty for a file.

    `url` is where the object would be, or the temporary file itself. `started` is in Unix seconds.
    """

    url: str
    size: int
    started: float
    upload: str = ""


class ObjectWriter(Protocol):
    """An object being written in one pass and constant memory.

    As a context manager it publishes the object on a clean exit, when `info` is set, and leaves no trace of it when
    the block raises.
    """

    info: ObjectInfo

    def write(self, data: bytes) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects under URLs, published whole or not at all. Methods take full URLs and may be called from any thread.

    All raise StorageError where access is refused and ServiceUnreachable where the store does not answer.
    """

    def head(self, url: str) -> ObjectInfo:
        """What is there now. Raises ObjectNotFound."""
        ...

    def read(self, url: str, start: int = 0, end: int | None = None, etag: str | None = None) -> bytes:
        """The bytes [start, end) of an object; `etag` as in `stream`."""
        ...

    def stream(
        self, url: str, start: int = 0, end: int | None = None, etag: str | None = None, chunk: int = CHUNK
    ) -> Iterator[bytes]:
        """The bytes [start, end) of one version of an object, in pieces of at most `chunk` bytes.

        A connection that is cut is taken up at the byte where it broke. Raises ObjectNotFound, and PreconditionFailed
        where the object is not, or is no longer, the version `etag`. Of a version that is named, `end` is no more than
        its size.
        """
        ...

    def put(self, url: str, data: bytes) -> ObjectInfo: ...

    def put_file(self, url: str, path: Path) -> ObjectInfo: ...

    def put_if_absent(self, url: str, data: bytes) -> ObjectInfo:
        """Creates an object that is not there yet. Raises PreconditionFailed where other bytes are.

        The same bytes under that URL are taken for our own earlier attempt whose answer was lost: a caller that must
        tell its own write from another's puts a unique id into the body.
        """
        ...

    def supports_conditional_put(self, url: str) -> bool:
        """Whether `put_if_absent` is atomic here; where it is not, it is a HEAD followed by a PUT."""
        ...

    def writer(self, url: str, size: int | None = None) -> ObjectWriter:
        """A writer for an object of about `size` bytes, where that is known: it decides the parts of an upload."""
        ...

    def check_writable(self, url: str) -> None:
        """Raises StorageError or UsageError where an object of that URL could not be written. Leaves nothing there."""
        ...

    def concat(self, sources: Sequence[ObjectInfo], url: str) -> ObjectInfo:
        """Joins objects in order into one that appears at once, in constant memory.

        Raises PreconditionFailed where a source has changed since, ObjectNotFound where it is gone.
        """
        ...

    def list(self, prefix_url: str) -> Iterator[ObjectInfo]:
        """The objects whose URL starts with that string, in the byte order of their URLs."""
        ...

    def folders(self, prefix_url: str) -> Iterator[str]:
        """The names between that string, which ends with a slash, and the next slash, of all objects, each once."""
        ...

    def stored(self, prefix_url: str) -> Iterator[StoredObject]:
        """The same as `list`, with their age instead of their version."""
        ...

    def delete(self, urls: Iterable[str]) -> None:
        """Removes objects; one that is not there is no error."""
        ...

    def unfinished(self, prefix_url: str) -> Iterator[UnfinishedWrite]:
        """Writes to such URLs that are under way, or whose writer died: what they hold shows in no listing.

        Raises StorageError where the store does not list them.
        """
        ...

    def discard(self, write: UnfinishedWrite) -> None:
        """Frees what the write holds; one that has ended meanwhile is no error."""
        ...


def stream_into(reader: Store, sources: Sequence[ObjectInfo], writer: ObjectWriter) -> ObjectInfo:
    """Copies the pinned sources into a writer, one after the other."""
    with writer:
        for source in sources:
            for piece in reader.stream(source.url, 0, source.size, source.etag):
                writer.write(piece)
    return writer.info


def refuse_parent_segments(url: str) -> None:
    """Raises UsageError for a URL with a `..` segment, which could lead out of the folder that it claims to be in."""
    if ".." in url.split("/"):
        raise UsageError(f"The URL {url!r} contains '..'.", hint="Give the resolved path.")
