"""A finished output read back: as JSON lines whatever its form, or copied as it is."""

from collections.abc import Iterator

from jobs.errors import UsageError
from jobs.formats.compressed import decompressed
from jobs.formats.json_values import json_rows
from jobs.formats.parquet import ParquetReader, RangedFile
from jobs.layout import absolute_url
from jobs.output import Output, output_of
from jobs.storage import ObjectInfo, Stores
from jobs.storage.base import CHUNK


def output_files(output: Output, url: str, stores: Stores) -> list[ObjectInfo]:
    """The file that an output is, or the parts in its folder, in order."""
    return (
        [info for info in stores.list(f"{url}part-") if info.url.endswith(output.suffix)]
        if output.folder
        else [stores.head(url)]
    )


def json_lines(info: ObjectInfo, output: Output, stores: Stores, chunk: int = CHUNK) -> Iterator[bytes]:
    """One file of an output, or the segment of a shard, as text of JSON lines in pieces that may end anywhere.

    Values of Parquet that JSON does not have are written as `jobs.formats.json_values` says.
    """
    if output.format == "parquet":
        reader = ParquetReader(RangedFile(stores, info.url, info.size, info.etag, info.url), info.url)
        for _, batch in reader.batches(0, reader.facts().rows):
            yield b"".join(line + b"\n" for line in json_rows(batch))
        return
    pieces = stores.stream(info.url, 0, info.size, info.etag, chunk)
    yield from pieces if output.compression is None else decompressed(pieces, output.compression, info.url)


def copy_output(output: Output, url: str, target: str, stores: Stores) -> None:
    """Copy an output to a path or URL: as it is, or as JSON lines where the target's name says so.

    Raises UsageError (`output_format`) where the target's name is of another form.
    """
    files = output_files(output, url, stores)
    wanted = output_of(target)
    if output.folder and wanted.folder:
        folder = f"{absolute_url(target).rstrip('/')}/"
        for info in stores.list(url):
            stores.concat([info], folder + info.url.removeprefix(url))
    elif not output.folder and wanted == output:
        stores.concat(files, absolute_url(target))
    elif wanted == Output():
        with stores.writer(absolute_url(target)) as writer:
            for info in files:
                for piece in json_lines(info, output, stores):
                    writer.write(piece)
    else:
        own = "a folder" if output.folder else f"a {output.suffix} file"
        raise UsageError(
            f"The output is {own}, and {target} has the name of something else.",
            code="output_format",
            hint=f"Give a name that ends with {'/' if output.folder else output.suffix}, or with .jsonl.",
        )
