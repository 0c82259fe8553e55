"""What a file is, by its name: `answers.csv.gz` is CSV in gzip."""

from jobs.spec import Compression, Format

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}


def format_of(name: str) -> Format | None:
    """The format that a name's suffix says, or None for a suffix that is none of ours."""
    suffix = compression_suffix(name)
    stem = name.lower().removesuffix(suffix)
    return next((kind for ending, kind in _FORMATS.items() if stem.endswith(ending)), None)


def compression_of(name: str) -> Compression | None:
    return _COMPRESSIONS.get(compression_suffix(name))


def compression_suffix(name: str) -> str:
    """`.gz`, `.zst`, `.bz2`, or nothing."""
    return next((suffix for suffix in _COMPRESSIONS if name.lower().endswith(suffix)), "")


def compression_of_bytes(head: bytes) -> Compression | None:
    """The compression of data that starts so."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
