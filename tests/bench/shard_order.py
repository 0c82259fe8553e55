"""What it saves to lease shards by prefix: each of several questions asked about each of many documents.

    python -m tests.bench.shard_order [--documents 96] [--questions 6] [--workers 2] [--rounds 3]

The file has one question's rows after the other's, so that a document comes up again when all others have been there.
Each worker's KV pool holds a quarter of the documents, and shards have as many rows as that. In each round the same
file is a job twice: with its shards in the order of the file, and in that of `jobs.prefixes`. Model, workers, Valkey
and store are real; each run has workers of its own, so that nobody finds a cache full.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig
from engine.machine import usable_cores
from engine.process import EngineProcess
from jobs.broker import Tokens, make_app
from jobs.control import Control
from jobs.formats.jsonl import dumps
from jobs.ledger import Ledger
from jobs.records import SegmentRecord
from jobs.sampling import Sampling
from jobs.spec import RecordRows
from jobs.storage import Stores
from jobs.submit import enter, prepare
from tests.bench.machine import processor
from tests.servers import valkey
from workers.bench_engine import encoder
from workers.bench_jobs import Crew

MODEL = "demo"
BLOCK = 32
POOL = 4
"""The part of the documents that a worker's KV pool holds, and a shard has: one in so many."""
DOCUMENT_CHARACTERS = 2400
ANSWER_TOKENS = 8
MOST_TOKENS = 2048
"""Of a row, with room: what the pool holds at least."""
QUESTIONS = (
    "What does this text propose?",
    "Who is meant to read this?",
    "Name one term that is defined here.",
    "What would a critic say of it?",
    "Give the text a title of five words.",
    "Which version of Python is named?",
    "What has to be decided still?",
    "Sum this up in a sentence.",
)
Order = Literal["file", "prefix"]


@dataclass(frozen=True)
class Run:
    seconds: float
    prompt_tokens: int
    cached_tokens: int


def prompts(documents: int, questions: int) -> list[str]:
    corpus = files("workers") / "bench_corpus"
    names = sorted(file.name for file in corpus.iterdir() if file.name.endswith(".rst"))
    text = "\n\n".join((corpus / name).read_text(encoding="utf-8") for name in names)
    parts = [text[n * DOCUMENT_CHARACTERS :][:DOCUMENT_CHARACTERS] for n in range(documents)]
    return [f"{part}\n\n{question}" for question in QUESTIONS[:questions] for part in parts]


def run(order: Order, rows: list[str], options: argparse.Namespace, engine: EngineConfig) -> Run:
    """One job from submit to its end. Raises SystemExit where rows are missing."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder, valkey(Path(folder)) as server:
        in_shard = options.documents // POOL
        settings = server.settings(
            storage=f"file://{folder}/store", max_shard_rows=in_shard, min_shard_tokens=1 << 30, shard_order=order
        )
        ledger, stores, tokens = Ledger(server.client), Stores(settings), Tokens(make_app(settings))
        control = Control(ledger, stores, tokens, settings)
        source = Path(folder) / "input.jsonl"
        source.write_bytes(b"".join(dumps({"prompt": row}) + b"\n" for row in rows))
        spec = prepare(
            str(source),
            model=MODEL,
            stores=stores,
            settings=settings,
            rows=RecordRows(prompt_column="prompt"),
            sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0),
        )
        enter(spec, ledger, stores, tokens)
        control.plan(spec.id)
        with Crew(options.workers, settings, engine, EngineProcess) as crew:
            crew.work()
        records = [record for record in ledger.records(spec.id).values() if isinstance(record, SegmentRecord)]
        control.assemble(spec.id)
        view = ledger.view(spec.id)
    if (view.state, view.done) != ("completed", len(rows)):
        raise SystemExit(f"The job is {view.state} with {view.done} of {len(rows)} rows.")
    ended, started = (record.finished_at or 0 for record in records), (record.started_at or 0 for record in records)
    return Run(max(ended) - min(started), view.usage.prompt_tokens, view.usage.cached_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=96)
    parser.add_argument("--questions", type=int, choices=range(1, len(QUESTIONS) + 1), default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    rows = prompts(options.documents, options.questions)
    encode = encoder(EngineConfig(MODEL))
    tokens = sum(len(encode(row)) for row in rows[: options.documents])
    engine = EngineConfig(
        MODEL,
        num_threads=max(1, usable_cores() // options.workers),
        block_size=BLOCK,
        num_kv_blocks=max(tokens // POOL, MOST_TOKENS) // BLOCK,
    )
    sys.stdout.write(
        f"{options.questions} questions about {options.documents} documents, {tokens:,} tokens; {options.workers} "
        f"workers with KV pools of {(engine.num_kv_blocks or 0) * BLOCK:,} tokens; {processor()}\n"
    )
    found: dict[Order, list[Run]] = {"file": [], "prefix": []}
    for number in range(options.rounds):
        for order, runs in found.items():
            runs.append(run(order, rows, options, engine))
            one = runs[-1]
            sys.stdout.write(
                f"round {number + 1}, order {order}: {one.seconds:.1f} s, {one.cached_tokens:,} of "
                f"{one.prompt_tokens:,} prompt tokens from the cache\n"
            )
            sys.stdout.flush()
    in_file, by_prefix = (statistics.median(one.seconds for one in runs) for runs in found.values())
    sys.stdout.write(f"medians: {in_file:.1f} and {by_prefix:.1f} s, ×{in_file / by_prefix:.2f}\n")


if __name__ == "__main__":
    main()
