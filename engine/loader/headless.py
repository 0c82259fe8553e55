"""Checkpoints of a decoder without its language head, or named as if there were none: embedding models come so."""

from pathlib import Path

from torch import Tensor

from engine.loader.json_file import read_json
from engine.loader.sources import TensorSource

_BODY, _HEAD = "model.", "lm_head."
# It is there under this name only if names lack the body's prefix.
_TELLTALE = "embed_tokens.weight"
_SUFFIX, _WITH_HEAD = "Model", "ForCausalLM"


def with_head(architecture: str) -> str:
    """Return the architecture that has `architecture`, such as `MistralModel`, for its body; any other as it is."""
    if not architecture.endswith(_SUFFIX):
        return architecture
    return architecture.removesuffix(_SUFFIX) + _WITH_HEAD


def is_headless(folder: Path) -> bool:
    """Whether `folder`/config.json describes a decoder's body alone, which generates nothing."""
    architectures = read_json(folder / "config.json").get("architectures") or []
    return bool(architectures) and all(str(name).endswith(_SUFFIX) for name in architectures)


class BodyTensors:
    """A source's tensors under the names that a body has in a model with a head, whichever they have in the file."""

    def __init__(self, source: TensorSource) -> None:
        bare = _TELLTALE in source.shapes
        self._source = source
        self._names = {
            f"{_BODY}{name}" if bare and not name.startswith(_HEAD) else name: name for name in source.shapes
        }
        self.shapes = {name: source.shapes[original] for name, original in self._names.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._names[name])
