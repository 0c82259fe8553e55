"""The form of a job's output, as the name of its URL says it, or a flag where the name leaves it open.

    answers.jsonl · answers.jsonl.gz · answers.jsonl.zst · answers.parquet      one file
    answers/                                                                    a dataset: a folder of such files

The error file is plain JSON lines whatever the output is, beside it: `answers.errors.jsonl`.
"""

import gzip
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

from jobs.errors import UsageError

OutputFormat = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
OutputCompression = Literal["gzip", "zstd"]

EMPTY: dict[OutputCompression | None, bytes] = {
    None: b"",
    "gzip": gzip.compress(b"", mtime=0),
    "zstd": pa.compress(b"", codec="zstd", asbytes=True),
}
"""No lines, as a file that readers of the compression take for a whole one."""
ERRORS_SUFFIX = ".errors.jsonl"

_SUFFIXES: dict[str, OutputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".ndjson.zst": "jsonl.zst",
    ".parquet": "parquet",
}
_COMPRESSIONS: dict[OutputFormat, OutputCompression] = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}
# Names that promise what is not written: whoever reads such a file would take it for something else.
_NOT_WRITTEN = (
    *(".csv", ".tsv", ".xlsx", ".arrow", ".feather", ".orc", ".avro"),
    *(".gz", ".zst", ".bz2", ".xz", ".zip"),
)


class Output(BaseModel):
    """Lines of JSON, compressed or not, or Parquet; in one file, or in a folder of parts."""

    model_config = ConfigDict(frozen=True)

    format: Literal["jsonl", "parquet"] = "jsonl"
    compression: OutputCompression | None = None
    folder: bool = False

    @model_validator(mode="after")
    def _parquet_compresses_itself(self) -> "Output":
        if self.format == "parquet" and self.compression is not None:
            raise ValueError("Parquet is compressed inside: compression is for jsonl")
        return self

    @property
    def name(self) -> OutputFormat:
        """What --output-format calls it."""
        if self.format == "parquet":
            return "parquet"
        names: dict[OutputCompression | None, OutputFormat] = {None: "jsonl", "gzip": "jsonl.gz", "zstd": "jsonl.zst"}
        return names[self.compression]

    @property
    def suffix(self) -> str:
        """What the names of its files end with."""
        return f".{self.name}"


def output_of(url: str | None, flag: OutputFormat | None = None, *, otherwise: OutputFormat = "jsonl") -> Output:
    """The form of an output with this URL, or of one that no URL was given for; `otherwise` where nothing says it.

    Raises UsageError (`output_format`) where name and flag contradict each other, or where the name is of a form that
    is not written.
    """
    folder = url is not None and url.endswith("/")
    named = None if url is None or folder else _named(url)
    if named is not None and flag is not None and named != flag:
        raise UsageError(
            f"--output-format {flag} contradicts the output's name, {url}, which is that of {named}.",
            code="output_format",
            hint="Leave out --output-format, or give the output another name.",
        )
    form = named or flag or otherwise
    return Output(
        format="parquet" if form == "parquet" else "jsonl", compression=_COMPRESSIONS.get(form), folder=folder
    )


def _named(url: str) -> OutputFormat | None:
    name = url.rsplit("/", 1)[-1].lower()
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return _SUFFIXES[suffix]
    if (wrong := next((suffix for suffix in _NOT_WRITTEN if name.endswith(suffix)), None)) is not None:
        raise UsageError(
            f"The output's name, {url}, ends with {wrong}, which --output-format does not have.",
            code="output_format",
            hint="Names end with .jsonl, .jsonl.gz, .jsonl.zst or .parquet; a folder of parts ends with a slash.",
        )
    return None


def errors_beside(output_url: str) -> str:
    """The error file of an output: `answers.parquet` has `answers.errors.jsonl`, and so has the folder `answers/`."""
    stem = output_url.rstrip("/")
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if not output_url.endswith("/") and stem.endswith(suffix):
            return stem.removesuffix(suffix) + ERRORS_SUFFIX
    return stem + ERRORS_SUFFIX
