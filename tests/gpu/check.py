"""What an NVIDIA GPU says to the kernels and the engine: are they right, and how fast are they?

    python -m tests.gpu.check --minutes 8 [--json FILE] [--only kernels engine speed] [--strict]

It needs torch, triton, transformers and numpy, and no installation: run it in a checkout. In this order, each part with
its share of the minutes, and of what those before it left:

    kernels  every Triton kernel against its definition: odd shapes, three seeds, poisoned memory
    engine   greedy tokens against Transformers' for tiny random models of each family, in float32; then with and
             without CUDA graphs and overlap, several answers to a prompt, preemption and swap
    speed    kernels beside a measured copy and a measured product of matrices; then the engine on nano-vllm's workload
             and with the shape of Llama 3.1 8B, beside Transformers' continuous batching

Compiling counts. What there was no time for is named. Whatever a case raises is reported, and the others run: each part
is a process of its own, started again where a kernel took the device down. The last output is one table; the exit
status is 1 if anything is wrong, and with --strict also if a bar is missed.

Without a GPU, `--device cpu` runs the first two parts at small sizes: the kernels on Triton's interpreter, which takes
a minute, and the engine with the kernels that CPUs have.
"""

import argparse
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import time
from typing import Any

import torch

from tests.gpu.cases import Outcome, Status
from tests.gpu.report import table

PARTS = {"kernels": ("kernels",), "engine": ("engine",), "speed": ("kernel speed", "engine speed")}
SHARES = {"kernels": 0.25, "engine": 0.19, "kernel speed": 0.18, "engine speed": 0.38}
# The longest that a case may say nothing: the first of a process compiles a dozen kernels.
STALL_S = {"kernels": 90.0, "engine": 120.0, "kernel speed": 90.0, "engine speed": 240.0}
# What a case may still take when the time of its section is over.
GRACE_S = 15.0
# A kernel that takes the device down once for each of its cases must not use up the minutes.
MOST_STARTS = 8
NO_TIME = "no time was left"


@dataclass
class Section:
    """A section's outcomes so far, gathered from one process after the other."""

    name: str
    deadline: float
    listed: list[str] | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    running: str | None = None

    @property
    def done(self) -> list[str]:
        return [one.name for one in self.outcomes]

    def take(self, line: dict[str, Any]) -> None:
        """Note one line that a worker wrote."""
        if "cases" in line:
            self.listed = line["cases"]
        elif "starts" in line:
            self.running = line["starts"]
        elif "broken" in line:
            say(f"{self.name}: the device works no more ({line['broken']}); starting again")
        else:
            self.running = None
            self.outcomes.append(Outcome(**line))
            say(_line(self.outcomes[-1]))

    def end(self, status: Status, reason: str) -> None:
        """The process ended, or was ended, in the middle of a case, or before it named any."""
        self.outcomes.append(Outcome(self.name, self.running or f"{self.name}: its process", status, reason))
        self.running = None
        say(_line(self.outcomes[-1]))

    def leave_out_the_rest(self) -> None:
        done = set(self.done)
        left = [name for name in self.listed or () if name not in done]
        self.outcomes.extend(Outcome(self.name, name, "left out", NO_TIME) for name in left)


def _line(one: Outcome) -> str:
    figures = " ".join(f"{value:.4g} {unit}" for unit, value in one.figures.items())
    return " ".join(filter(None, (f"[{one.seconds:6.2f} s]", one.status, one.section, one.name, figures, one.detail)))


def run_section(name: str, options: argparse.Namespace, deadline: float, folder: Path) -> list[Outcome]:
    """Run a section until its deadline, in as many processes as it takes."""
    section = Section(name, deadline)
    for _ in range(MOST_STARTS):
        known = len(section.done)
        _run_worker(section, options, folder)
        if section.listed is None or set(section.listed) <= set(section.done):
            break
        if time() >= deadline or len(section.done) == known:
            break
    section.leave_out_the_rest()
    return section.outcomes


def _run_worker(section: Section, options: argparse.Namespace, folder: Path) -> None:
    reading, writing = os.pipe()
    order = {
        "section": section.name,
        "device": options.device,
        "deadline": section.deadline,
        "folder": str(folder),
        "done": section.done,
        "match": options.match,
        "pipe": writing,
    }
    command = [sys.executable, "-m", "tests.gpu.worker", json.dumps(order)]
    root = Path(__file__).parents[2]
    silent = False
    with subprocess.Popen(command, cwd=root, env=_environment(options.device), pass_fds=(writing,)) as process:
        os.close(writing)
        with open(reading, "rb", buffering=0) as pipe:
            for line in _lines(pipe, section):
                silent = line is None
                if line is None:
                    process.kill()
                else:
                    section.take(json.loads(line))
        status = process.wait()
    if silent and time() >= section.deadline:
        if section.running is not None or section.listed is None:
            section.end("left out", "cut off: its section's time was over")
    elif silent:
        section.end("wrong", f"it hung: no word for {STALL_S[section.name]:.0f} s")
    elif status or section.running is not None:
        section.end("wrong", f"the process ended with status {status}")


def _lines(pipe: Any, section: Section) -> Iterator[bytes | None]:
    """The worker's lines; None, once, if the next one does not come in time."""
    kept = b""
    while True:
        patience = min(STALL_S[section.name], section.deadline + GRACE_S - time())
        if patience <= 0 or not select.select([pipe], [], [], patience)[0]:
            yield None
            return
        read = os.read(pipe.fileno(), 1 << 16)
        if not read:
            return
        *whole, kept = (kept + read).split(b"\n")
        yield from whole


def _environment(device: str) -> dict[str, str]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        # Triton reads this when it is imported.
        environment["TRITON_INTERPRET"] = "1"
    return environment


def run(options: argparse.Namespace) -> list[Outcome]:
    """Run the sections that were asked for, one after the other; none starts later than the minutes allow."""
    end = time() + 60 * options.minutes
    names = [section for part in options.only for section in PARTS[part]]
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="pagemill-gpu-", dir=_roomy_folder()))
    try:
        for place, name in enumerate(names):
            share = SHARES[name] / sum(SHARES[later] for later in names[place:])
            deadline = time() + share * (end - time() - GRACE_S)
            say(f"--- {name}: {max(0.0, deadline - time()):.0f} s")
            if name in PARTS["speed"] and options.device == "cpu":
                outcomes.append(Outcome(name, name, "left out", "a CPU's times say nothing of a GPU"))
            elif deadline <= time():
                outcomes.append(Outcome(name, name, "left out", NO_TIME))
            else:
                outcomes.extend(run_section(name, options, deadline, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def _roomy_folder() -> str | None:
    """Where 20 GB of weights are written and read fastest: in memory, if there is that much; None: the usual place."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 40 << 30 else None


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if device == "cpu":
        return {"device": "CPU, Triton interpreted", **found}
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    return {"device": f"{properties.name}, {memory}", "cuda": str(torch.version.cuda), **found}


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long it may take in all (8)")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="some of the parts")
    parser.add_argument(
        "--match", nargs="+", default=[], metavar="TEXT", help="only cases with one of these in their name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes here, tracebacks included")
    parser.add_argument("--strict", action="store_true", help="a bar that is missed is an error")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small sizes, on Triton's interpreter"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("torch finds no CUDA device here; --device cpu runs what a CPU can.")
        return 2
    began = time()
    about = machine(options.device)
    outcomes = run(options)
    seconds = time() - began
    if options.json:
        found = {"machine": about, "seconds": seconds, "outcomes": [one.as_dict() for one in outcomes]}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    title = f"tests.gpu.check, {seconds:.0f} s: " + ", ".join(f"{name} {value}" for name, value in about.items())
    say("\n" + table(title, outcomes))
    missed = any(one.met is False for one in outcomes)
    nothing_right = not any(one.status == "ok" for one in outcomes)
    return int(nothing_right or any(one.status == "wrong" for one in outcomes) or (options.strict and missed))


if __name__ == "__main__":
    sys.exit(main())
