"""The input as the submitter names it - files, folders, globs, URLs, standard input - as pinned files.

A path or key that exists is that file, whatever characters it has. Else `*`, `?` and `[...]` stand for characters
other than `/`, and `**` for any. A folder is all files below it, but for those whose name begins with `.` or `_`.
Files come in the order in which they were named, and those of one name in the byte order of their paths.
"""

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pyarrow as pa

from jobs.errors import ObjectNotFound, UsageError
from jobs.formats.arrow_types import plain
from jobs.formats.names import compression_of, compression_of_bytes, compression_suffix, format_of
from jobs.formats.parquet import ParquetFacts, ParquetReader, RangedFile, common_schema
from jobs.formats.where import parse_where, top_column
from jobs.layout import JobLayout, absolute_url
from jobs.parquet_rows import dump_schema
from jobs.spec import Format, Input, InputFile
from jobs.storage import Stores
from jobs.storage.file import path_of

STDIN = "-"
MAX_FILES = 10_000
"""The ledger holds a job's spec, which lists its files."""

_HEADS_AT_ONCE = 16
_PIECE = 1 << 20
_SHOWN_NAMES = 20
_SPECIAL = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class InputOptions:
    """What a job takes of its files; see `Input`. Without a format the files' names say it."""

    format: Format | None = None
    limit: int | None = None
    sample: int | None = None
    sample_seed: int = 0
    where: str | None = None
    columns: tuple[str, ...] | None = None


def find_files(sources: Sequence[str], stores: Stores) -> list[str]:
    """The URLs of the files that the sources name, or `-` alone for standard input.

    Raises UsageError for a source that is missing or named twice, and whatever the storage raises.
    """
    if STDIN in sources:
        if len(sources) > 1:
            raise UsageError("Standard input ('-') cannot be one of several inputs.", hint="Give '-' alone.")
        return [STDIN]
    seen: dict[str, None] = {}
    for source in sources:
        for url in _files_of(source, stores):
            if url in seen:
                raise UsageError(f"{url} is named twice: its rows would run twice.", hint="Name each file once.")
            seen[url] = None
    if not seen:
        raise UsageError("There is no input.", code="input_not_found", hint="Name a file, a folder, or '-'.")
    if len(seen) > MAX_FILES:
        raise UsageError(f"The input is more than {MAX_FILES:,} files.", hint="Join some, or submit several jobs.")
    return list(seen)


def place_files(urls: Sequence[str], options: InputOptions, layout: JobLayout, stores: Stores) -> Input:
    """The input of these files, where workers can read it: local ones are uploaded where the storage is not local.

    Raises UsageError for files that are empty, or of more than one format; and whatever the storage raises.
    """
    if list(urls) == [STDIN]:
        kind = options.format or "jsonl"
        files = [_standard_input(kind, layout, stores)]
    else:
        kind = options.format or _common_format(urls)
        with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
            files = list(pool.map(lambda place, url: _placed(place, url, kind, layout, stores), count(), urls))
    _check_sizes(files)
    given = Input(
        files=tuple(files),
        format=kind,
        limit=options.limit,
        sample=options.sample,
        sample_seed=options.sample_seed,
        where=options.where,
        columns=options.columns,
    )
    if kind == "parquet":
        return _with_schema(given, stores)
    if options.where is not None or options.columns is not None:
        raise UsageError(f"--where and --select are for Parquet, and the input is {kind}.")
    return given


def _with_schema(given: Input, stores: Stores) -> Input:
    """The input with what its files say of themselves. Raises UsageError where that is not what is asked for."""
    compressed = next((file for file in given.files if file.compression), None)
    if compressed is not None:
        raise UsageError(
            f"{compressed.label} is Parquet in an archive, which cannot be read in parts.", hint="Decompress it."
        )

    def facts_of(file: InputFile) -> ParquetFacts:
        ranged = RangedFile(stores, file.url, file.size, file.etag, file.label)
        return ParquetReader(ranged, file.label).facts()

    with ThreadPoolExecutor(_HEADS_AT_ONCE) as pool:
        facts = list(pool.map(facts_of, given.files))
    found = common_schema([(file.label, fact.schema) for file, fact in zip(given.files, facts, strict=True)])
    schema = pa.schema([field.with_type(plain(field.type)) for field in found])
    _check_columns(given, schema)
    return given.model_copy(
        update={
            "files": tuple(
                file.model_copy(update={"rows": fact.rows}) for file, fact in zip(given.files, facts, strict=True)
            ),
            "arrow_schema": dump_schema(schema),
            "regroup": any(fact.has_large_groups for fact in facts),
        }
    )


def _check_columns(given: Input, schema: pa.Schema) -> None:
    where = parse_where(given.where) if given.where is not None else None
    asked = [("--select", name) for name in given.columns or ()]
    asked += [("--where", top_column(schema, name)) for name in (where.columns if where else ())]
    for flag, name in asked:
        require_column(flag, name, schema.names)
    if where is not None:
        where.check(schema)


def require_column(flag: str, name: str, names: Sequence[str]) -> None:
    """Raises UsageError where none of the columns has this name."""
    if name not in names:
        known = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        raise UsageError(f"{flag}: the input has no column '{name}'.", hint=f"It has: {known}.")


def _files_of(source: str, stores: Stores) -> list[str]:
    url = absolute_url(source)
    if url.startswith("file://"):
        path = path_of(url)
        if path.is_dir():
            return _in_folder(source, f"file://{path}/", stores)
        if path.exists():
            return [f"file://{path}"]
        missing = UsageError(f"There is no file {source}.", code="input_not_found")
    else:
        if url.endswith("/"):
            return _in_folder(source, url, stores)
        try:
            return [stores.head(url).url]
        except ObjectNotFound:
            missing = UsageError(
                f"There is no object {source}.",
                code="input_not_found",
                hint="If it is a folder, end it with '/'.",
            )
    if _SPECIAL.search(url):
        return _matching(source, url, stores)
    raise missing


def _in_folder(source: str, url: str, stores: Stores) -> list[str]:
    paths = (info.url.removeprefix(url) for info in stores.list(url))
    # A key that ends with a slash is what some tools make of a folder.
    names = [
        path
        for path in paths
        if not path.endswith("/") and path and not any(part.startswith((".", "_")) for part in path.split("/"))
    ]
    if not names:
        raise UsageError(f"The folder {source} has no files.", code="input_not_found")
    for name in names:
        if format_of(name) is None:
            raise UsageError(
                f"The folder {source} has a file that is no input by its name: {name}.",
                hint=f"Name the files that are: '{source.rstrip('/')}/**.jsonl'.",
            )
    return [url + name for name in names]


def _matching(source: str, url: str, stores: Stores) -> list[str]:
    found = _SPECIAL.search(url)
    prefix = url[: found.start()] if found else url
    try:
        pattern = re.compile(_regex(url), re.DOTALL)
    except re.error as error:
        raise UsageError(f"{source} is no glob: {error}.") from error
    urls = [info.url for info in stores.list(prefix) if pattern.fullmatch(info.url) and not info.url.endswith("/")]
    if not urls:
        raise UsageError(f"No file matches {source}.", code="input_not_found")
    return urls


def _regex(glob: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])", glob)
    return "".join(_GLOB.get(part) or _class(part) or re.escape(part) for part in parts)


_GLOB = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _class(part: str) -> str:
    """A `[...]` of a glob as a regular expression; nothing for any other part."""
    if len(part) < 3 or not part.startswith("["):
        return ""
    negated = part[1] == "!"
    inner = re.sub(r"([][\\^&~|])", r"\\\1", part[2 if negated else 1 : -1])
    return f"(?!/)[{'^' * negated}{inner}]"


def _common_format(urls: Sequence[str]) -> Format:
    """The one format of the files; a name that says none is one of JSON lines."""
    kinds = {url: format_of(url) or "jsonl" for url in urls}
    first = urls[0]
    for url, kind in kinds.items():
        if kind != kinds[first]:
            raise UsageError(
                f"The input mixes formats: {first} is {kinds[first]}, and {url} is {kind}.",
                hint="Submit a job for each, or say with --input-format what they all are.",
            )
    return kinds[first]


def _placed(place: int, url: str, kind: Format, layout: JobLayout, stores: Stores) -> InputFile:
    name = url.removeprefix("file://")
    compression = compression_of(url)
    if url.startswith("file://") and not layout.storage_url.startswith("file://"):
        target = layout.input(place, f".{kind}{compression_suffix(url)}")
        info = stores.put_file(target, path_of(url))
    else:
        info = stores.head(url)
    return InputFile(name=name, url=info.url, size=info.size, etag=info.etag, compression=compression)


def _standard_input(kind: Format, layout: JobLayout, stores: Stores) -> InputFile:
    url = layout.input(0, f".{kind}")
    head = sys.stdin.buffer.read(_PIECE)
    with stores.writer(url) as writer:
        piece = head
        while piece:
            writer.write(piece)
            piece = sys.stdin.buffer.read(_PIECE)
    info = writer.info
    compression = compression_of_bytes(head)
    return InputFile(name="standard input", url=info.url, size=info.size, etag=info.etag, compression=compression)


def _check_sizes(files: list[InputFile]) -> None:
    for file in files:
        if file.size == 0 and (file.compression or len(files) == 1):
            raise UsageError(f"{file.label} is empty.", code="empty_file", hint="It is to have at least one row.")
    if not any(file.size for file in files):
        raise UsageError(f"All {len(files)} files of the input are empty.", code="empty_file")
