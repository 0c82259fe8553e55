"""gzip, zstd and bz2 as streams: all members or frames of a file, and an error where the last one is not whole."""

from bz2 import BZ2Decompressor
from collections.abc import Iterable, Iterator

import pyarrow as pa

from jobs.errors import PagemillError
from jobs.spec import Compression

MAX_RATIO = 200
UNCHECKED = 1 << 30
"""So many bytes may come of an archive of any size: beyond it they may be `MAX_RATIO` times the archive's."""

_PIECE = 1 << 20
_BZ2_READ = 1 << 16  # what follows a stream is copied: of many small ones in one large read that would be squared


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
        for piece in _bz2_pieces(source) if compression == "bz2" else _arrow_pieces(source, compression):
            size += len(piece)
            if size > max(UNCHECKED, MAX_RATIO * source.size):
                raise PagemillError(
                    f"{name} looks like a decompression bomb: {source.size:,} of its bytes hold {size:,}.",
                    code="decompression_bomb",
                    hint="If it is none, decompress it before it is submitted.",
                )
            yield piece
    except (OSError, pa.ArrowException) as error:
        if source.error is not None:
            raise source.error from error
        raise _unreadable(error, compression, name, size) from error
    if source.size == 0:
        raise PagemillError(f"{name} is empty: not even an archive of nothing.", code="truncated_input")


def _arrow_pieces(source: _Chunks, compression: Compression) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression) as stream:
        while piece := stream.read(_PIECE):
            yield piece


def _bz2_pieces(source: _Chunks) -> Iterator[bytes]:
    """The same with Python's own bz2: Arrow's fails at streams of nothing between others."""
    decoder = BZ2Decompressor()
    while True:
        data = b""
        if decoder.eof:
            data = decoder.unused_data or source.read(_BZ2_READ)
            if not data:
                return
            decoder = BZ2Decompressor()
        elif decoder.needs_input and not (data := source.read(_BZ2_READ)):
            raise OSError("Truncated bz2 stream")
        if piece := decoder.decompress(data, _PIECE):
            yield piece


def _unreadable(error: Exception, compression: Compression, name: str, size: int) -> PagemillError:
    if "Truncated" in str(error):
        return PagemillError(
            f"{name} is cut off: its {compression} stream has no end, after {size:,} bytes of content.",
            code="truncated_input",
            hint="Make or copy the file again.",
        )
    if "too much memory" in str(error):
        return PagemillError(
            f"{name} was compressed with a window of more than 128 MiB.",
            code="corrupt_input",
            hint="Compress it again without --long, or with --long=27.",
        )
    return PagemillError(
        f"{name} cannot be decompressed as {compression} after {size:,} bytes of content ({error}).",
        code="corrupt_input",
        hint="Its suffix says how it is compressed: .gz, .zst or .bz2.",
    )
