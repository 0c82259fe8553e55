"""Is the engine slower than it was? Tokens a second relative to a product of matrices measured beside it.

    python -m tests.bench.check            compare with what is stored; exit 1 if it is slower
    python -m tests.bench.check --update   store what is measured now

Slices of W1 to W4 take turns with a calibration, a product of two bfloat16 matrices, and what counts is the median over
the rounds of the engine's rate divided by the calibration's: so a machine that others slow down for a while does not
look like a slow engine. A slice is slower if its ratio is more than 10 % below the stored one.

A ratio says something on the kind of processor it was measured on and with as many threads. On another the figures are
printed, nothing is judged, and the exit status is 0: a check that cannot be made is no failure of the engine, and
whoever wants one there stores ratios of that machine first.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from engine import LLM
from engine.config import EngineConfig
from tests.bench.machine import processor
from workers.bench_ceilings import gemm_rate
from workers.bench_engine import encoder, generate
from workers.bench_workloads import Row, Workload, build_workloads

STORED = Path(__file__).with_name("check.json")
SLOWER = 0.10
NAMES = ("W1", "W2", "W3", "W4")
_SCALE = 1 / 16
_MOST_NEW_TOKENS = 64
_ROUNDS = 3


@dataclass(frozen=True)
class Ratios:
    """Tokens (prompt and new) for each GFLOP of the calibration, by workload, and what they were measured on."""

    processor: str
    threads: int
    ratios: dict[str, float]


@dataclass(frozen=True)
class Verdict:
    """What is to be said, and whether the engine is slower; `judged` is False where that cannot be known."""

    lines: tuple[str, ...]
    slower: bool
    judged: bool


def measure(model: str, rounds: int) -> Ratios:
    """Measure slices and calibration in turn. Each round has other texts, so that nothing is in the prefix cache."""
    llm = LLM(model, dtype="bfloat16")
    encode = encoder(EngineConfig(model))
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        workloads = build_workloads(encode, scale=_SCALE, edition=number)
        for name in NAMES:
            work = _slice(workloads[name])
            before = _calibrate()
            seconds, _ = generate(llm, work)
            rate = (work.prompt_tokens + work.new_tokens) / seconds
            if number:  # the first is the warm-up
                found[name].append(rate / ((before + _calibrate()) / 2) * 1e9)
    ratios = {name: statistics.median(values) for name, values in found.items()}
    return Ratios(processor(), torch.get_num_threads(), ratios)


def _slice(workload: Workload) -> Workload:
    """The workload with its long answers cut short: more steps of a few rows say nothing more."""
    rows = tuple(Row(row.prompt, min(row.new_tokens, _MOST_NEW_TOKENS)) for row in workload.rows)
    return replace(workload, rows=rows)


def _calibrate() -> float:
    return gemm_rate(torch.device("cpu"), torch.bfloat16, min_seconds=0.15)


def judge(stored: Ratios, now: Ratios, slower: float = SLOWER) -> Verdict:
    """Compare slice by slice."""
    lines = [_line(name, stored.ratios, ratio) for name, ratio in now.ratios.items()]
    if (stored.processor, stored.threads) != (now.processor, now.threads):
        lines.append(f"Not judged: stored on {stored.processor} with {stored.threads} threads, measured on")
        lines.append(f"{now.processor} with {now.threads}. `make bench-check-update` stores what is measured here.")
        return Verdict(tuple(lines), slower=False, judged=False)
    late = [name for name, ratio in now.ratios.items() if ratio < (1 - slower) * stored.ratios.get(name, 0.0)]
    lines.append(f"Slower by more than {slower:.0%}: {', '.join(late)}." if late else "Not slower.")
    return Verdict(tuple(lines), slower=bool(late), judged=True)


def _line(name: str, stored: Mapping[str, float], ratio: float) -> str:
    if name not in stored:
        return f"{name}: {ratio:.3f} tokens a GFLOP of calibration, and nothing stored"
    return f"{name}: {ratio:.3f} tokens a GFLOP of calibration, stored {stored[name]:.3f}: {ratio / stored[name]:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="store what is measured")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parser.parse_args()

    now = measure(options.model, options.rounds)
    if options.update:
        STORED.write_text(json.dumps(asdict(now), indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"Stored in {STORED.name}: {now}\n")
        return
    verdict = judge(Ratios(**json.loads(STORED.read_text(encoding="utf-8"))), now)
    sys.stdout.write("\n".join(verdict.lines) + "\n")
    sys.exit(verdict.slower)


if __name__ == "__main__":
    main()
