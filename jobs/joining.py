"""The output of a job from its segments: one file, or a folder of parts that readers take for one dataset.

    segments   | 0 | 1 | 2 | 3 |        4        | 5 |
    file       |        all of them, in order        |
    folder     | part-00000 |    part-00001      | 2 |      small ones together, up to about 128 MiB

JSON lines are joined by the store where it can; Parquet is decoded and written again, but for a part that is one
segment. In a folder `_manifest.json` is written last, and says what the parts are; before it `.huggingface.yaml`.
"""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from jobs.errors import ObjectNotFound
from jobs.formats.dataset_card import DATASET_CARD, dataset_card
from jobs.formats.json_columns import is_json_text
from jobs.formats.parquet_out import Sink, join
from jobs.output import EMPTY, Output
from jobs.records import Column, DatasetManifest, DatasetPart, Part, ResultFile, SegmentRecord, Usage
from jobs.spec import JobSpec
from jobs.storage import ObjectInfo, Stores
from jobs.table import json_columns, output_schema, result_schema

PART_BYTES = 128 * 1024 * 1024

_MANIFEST = "_manifest.json"


class _Segment(NamedTuple):
    """The output of one shard."""

    info: ObjectInfo
    part: Part


class _Joined(NamedTuple):
    """An object that is written; its digest, where its bytes passed through here or are those of one segment."""

    size: int
    sha256: str | None


def join_output(
    spec: JobSpec, stores: Stores, segments: dict[int, SegmentRecord], on_progress: Callable[[], None]
) -> ResultFile:
    """Write the job's output; a repetition writes the same. Holds a few row groups of Parquet, and of lines nothing.

    Raises PreconditionFailed and ObjectNotFound for a segment that is not what its record says.
    """
    found: list[_Segment] = []
    for shard, record in sorted(segments.items()):
        info, _ = record.objects(spec.layout, shard)
        if info is not None and record.output is not None:
            found.append(_Segment(info, record.output))
    lines = sum(segment.part.lines for segment in found)
    table = _table_columns(spec, stores, found) if spec.output.format == "parquet" else None
    joiner = _Joiner(spec, stores, table, on_progress)
    if not spec.output.folder:
        return ResultFile(url=spec.output_url, size=joiner.write(found, spec.output_url).size, lines=lines)
    parts = tuple(joiner.parts(found))
    _remove_others(stores, spec.output, spec.output_url, parts)
    size = sum(part.bytes for part in parts)
    columns = table or json_columns(spec, stores)
    dataset = DatasetManifest(
        job_id=spec.id,
        format=spec.output.format,
        rows=lines,
        bytes=size,
        ok=sum(record.ok for record in segments.values()),
        failed=sum(record.failed for record in segments.values()),
        usage=sum((record.usage for record in segments.values()), Usage()),
        columns=columns and tuple(_column(spec.output, field) for field in columns),
        parts=parts,
    )
    card = dataset_card(f"part-*{spec.output.suffix}", None if table else columns)
    stores.put(spec.output_url + DATASET_CARD, card)
    stores.put(spec.output_url + _MANIFEST, dataset.model_dump_json(by_alias=True, indent=2).encode())
    return ResultFile(url=spec.output_url, size=size, lines=lines)


def _table_columns(spec: JobSpec, stores: Stores, segments: list[_Segment]) -> pa.Schema:
    """The columns of a Parquet output: of a job that ended before it was planned, those that are its own."""
    try:
        return output_schema(spec, stores)
    except ObjectNotFound:
        if segments:
            raise
        return result_schema(spec)


def _column(output: Output, field: pa.Field) -> Column:
    is_json = output.format == "jsonl" and is_json_text(field)
    return Column(name=field.name, type="json" if is_json else str(field.type))


def _remove_others(stores: Stores, output: Output, folder: str, parts: tuple[DatasetPart, ...]) -> None:
    """Take away what an assembler wrote that was stopped, and that found other segments than there are now."""
    ours = re.compile(re.escape(folder) + r"part-\d{5}" + re.escape(output.suffix))
    named = {folder + part.name for part in parts}
    found = [info.url for info in stores.list(f"{folder}part-")]
    stores.delete([url for url in found if ours.fullmatch(url) and url not in named])


class _Joiner:
    def __init__(
        self, spec: JobSpec, stores: Stores, schema: pa.Schema | None, on_progress: Callable[[], None]
    ) -> None:
        self._output = spec.output
        self._url = spec.output_url
        self._stores = stores
        self._on_progress = on_progress
        self._schema = schema

    def parts(self, segments: list[_Segment]) -> Iterator[DatasetPart]:
        """Write the parts of the folder. There is one at least, so that readers find the columns of no rows."""
        for number, group in enumerate(_grouped(segments)):
            name = f"part-{number:05}{self._output.suffix}"
            size, sha256 = self.write(group, self._url + name, hashed=True)
            rows = sum(segment.part.lines for segment in group)
            yield DatasetPart(name=name, rows=rows, bytes=size, sha256=sha256 or "")
            self._on_progress()

    def write(self, segments: list[_Segment], url: str, *, hashed: bool = False) -> _Joined:
        """Join segments in one object; `hashed` wants its digest, for which lines may have to pass through here."""
        infos = [segment.info for segment in segments]
        if len(segments) == 1:
            return _Joined(self._stores.concat(infos, url).size, segments[0].part.sha256)
        if self._schema is not None:
            return self._write_parquet(infos, url, self._schema)
        if not segments:
            empty = EMPTY[self._output.compression]
            return _Joined(self._stores.put(url, empty).size, hashlib.sha256(empty).hexdigest())
        if hashed:
            return self._stream(infos, url)
        return _Joined(self._stores.concat(infos, url).size, None)

    def _stream(self, segments: list[ObjectInfo], url: str) -> _Joined:
        with self._stores.writer(url, sum(info.size for info in segments)) as writer:
            sink = Sink(writer)
            for info in segments:
                for piece in self._stores.stream(info.url, 0, info.size, info.etag):
                    sink.write(piece)
        return _Joined(sink.tell(), sink.sha256)

    def _write_parquet(self, segments: list[ObjectInfo], url: str, schema: pa.Schema) -> _Joined:
        with tempfile.TemporaryDirectory(prefix="pagemill-join-") as folder:
            with self._stores.writer(url, sum(info.size for info in segments)) as writer:
                sink = Sink(writer)
                join(self._fetched(segments, Path(folder) / "segment.parquet"), sink, schema)
        return _Joined(sink.tell(), sink.sha256)

    def _fetched(self, segments: Iterable[ObjectInfo], path: Path) -> Iterator[Path]:
        """Each segment in turn as a local file, the same one: Parquet is read from its end."""
        for info in segments:
            with path.open("wb") as file:
                for piece in self._stores.stream(info.url, 0, info.size, info.etag):
                    file.write(piece)
            yield path
            self._on_progress()


def _grouped(segments: list[_Segment]) -> Iterator[list[_Segment]]:
    """Neighbours that make a part together. A segment that is large enough by itself is a part of its own."""
    group: list[_Segment] = []
    size = 0
    for segment in segments:
        if group and size + segment.info.size > PART_BYTES:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.info.size
    if group or not segments:
        yield group
