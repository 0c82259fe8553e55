"""`make scale`: a large job of each kind, and what it takes. Ends with 1 where that is more than is promised.

Needs about three times the input's size in the temporary folder, and for Parquet twice its size in memory.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.scale.inputs import RECORD, REQUEST, write_lines, write_one_group
from tests.scale.mill import Measured, mill

_MIB = 1 << 20
_TIMEOUT_S = 2 * 3600


class _Kind(NamedTuple):
    """An input: how it is written, what is asked of it, and what is promised of its processes' memory and of speed."""

    suffix: str
    write: Callable[[Path, int], int]
    options: tuple[str, ...]
    max_peak: int
    min_mb_per_s: float


_KINDS = {
    "records": _Kind(
        ".jsonl",
        lambda path, size: write_lines(path, size, RECORD),
        ("--prompt-column", "prompt", "--max-tokens", "16"),
        400 * _MIB,
        100,
    ),
    "openai": _Kind(".jsonl", lambda path, size: write_lines(path, size, REQUEST), (), 400 * _MIB, 100),
    "parquet": _Kind(".parquet", write_one_group, ("--prompt-column", "prompt", "--max-tokens", "16"), 600 * _MIB, 0),
}
_LEDGER_BYTES_A_ROW = 10
_SMALL_LEDGER = 4 * _MIB


def measure(kind: str, size: int, workers: int) -> Measured:
    """Run a job of that kind and size in a temporary folder."""
    suffix, write, options, *_ = _KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="pagemill-scale-") as name:
        folder = Path(name)
        source = folder / f"input{suffix}"
        rows = write(source, size)
        with mill(folder, workers) as running:
            measured = running.run(source, options, _TIMEOUT_S)
    assert measured.rows == rows, f"{measured.rows} of {rows} rows"
    return measured


def _broken(kind: str, measured: Measured) -> list[str]:
    """Which promises are not kept."""
    limits = _KINDS[kind]
    found = [
        f"{name}: {peak / _MIB:.0f} MiB, more than {limits.max_peak / _MIB:.0f}"
        for name, peak in measured.peaks.items()
        if peak > limits.max_peak
    ]
    if measured.planning_mb_per_s < limits.min_mb_per_s:
        found.append(f"planning: {measured.planning_mb_per_s:.0f} MB a second of processor time")
    if measured.ledger_bytes > max(_LEDGER_BYTES_A_ROW * measured.rows, _SMALL_LEDGER):
        found.append(f"ledger: {measured.ledger_bytes / measured.rows:.1f} bytes a row")
    return found


def _shown(kind: str, measured: Measured) -> str:
    peaks = ", ".join(f"{name} {peak / _MIB:.0f}" for name, peak in measured.peaks.items())
    seconds = ", ".join(f"{name} {spent:.0f}" for name, spent in measured.seconds.items())
    return "\n".join(
        [
            f"{kind}: {measured.input_bytes / 1e6:,.0f} MB, {measured.rows:,} rows, {measured.shards:,} shards",
            f"  planning  {measured.planning_mb_per_s:.0f} MB/s of one core, {measured.planning_peak / _MIB:.0f} MiB",
            f"  peak MiB  {peaks}",
            f"  ledger    {measured.ledger_bytes / 1e6:.1f} MB, {measured.ledger_bytes / measured.shards:.0f} a shard",
            f"  seconds   {seconds}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", choices=[*_KINDS], metavar="KIND", help=f"{', '.join(_KINDS)}; default: all"
    )
    parser.add_argument("--megabytes", type=float, help="of input; 5000 by default, and of Parquet 2000")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    failed = False
    for kind in options.kinds or _KINDS:
        size = options.megabytes or (2000 if kind == "parquet" else 5000)
        measured = measure(kind, int(size * 1e6), options.workers)
        broken = _broken(kind, measured)
        failed |= bool(broken)
        if options.json:
            print(json.dumps({"kind": kind, **asdict(measured), "broken": broken}), flush=True)  # noqa: T201
        else:
            print(_shown(kind, measured), *(f"  BROKEN    {promise}" for promise in broken), sep="\n", flush=True)  # noqa: T201
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
