"""gzip, zstd and bz2 as streams: all members or frames of a file, and an error where the last one is not whole."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from jobs.errors import PagemillError
from jobs.spec import Compression

MAX_RATIO = 200
UNCHECKED = 1 << 30
"""So many bytes may come of an archive of any size: beyond it they may be `MAX_RATIO` times the archive's."""

_PIECE = 1 << 20


class _Chunks:
    """Chunks of bytes as a file for Arrow to read; an error while reading is kept, since Arrow may wrap it."""

    closed = False

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._held = b""
        self.size = 0
        self.error: Exception | None = None

    def read(self, size: int) -> bytes:
        try:
            while not self._held and (chunk := next(self._chunks, None)) is not None:
                self._held = chunk
        except Exception as error:
            self.error = error
            raise
        data, self._held = self._held[:size], self._held[size:]
        self.size += len(data)
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def decompressed(chunks: Iterable[bytes], compression: Compression, name: str) -> Iterator[bytes]:
    """What is in an archive, in pieces of at most 1 MiB. `name` is for errors.

    Raises PagemillError: `truncated_input` where the archive stops before its end, `corrupt_input` where it is none,
    `decompression_bomb` where it holds far more than its own size.
    """
    source = _Chunks(chunks)
    size = 0
    try:
        with pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression) as stream:
            while piece := stream.read(_PIECE):
                size += len(piece)
                if size > max(UNCHECKED, MAX_RATIO * source.size):
                    raise PagemillError(
                        f"{name} looks like a decompression bomb: {source.size:,} of its bytes hold {size:,}.",
                        code="decompression_bomb",
                        hint="If it is none, decompress it before it is submitted.",
                    )
                yield piece
    except OSError as error:
        if source.error is not None:
            raise source.error from error
        raise _unreadable(error, compression, name, size) from error
    if source.size == 0:
        raise PagemillError(f"{name} is empty: not even an archive of nothing.", code="truncated_input")


def _unreadable(error: OSError, compression: Compression, name: str, size: int) -> PagemillError:
    if "Truncated" in str(error):
        return PagemillError(
            f"{name} is cut off: its {compression} stream has no end, after {size:,} bytes of content.",
            code="truncated_input",
            hint="Make or copy the file again.",
        )
    return PagemillError(
        f"{name} cannot be decompressed as {compression} after {size:,} bytes of content ({error}).",
        code="corrupt_input",
        hint="Its suffix says how it is compressed: .gz, .zst or .bz2.",
    )
