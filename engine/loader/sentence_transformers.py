"""What sentence-transformers' files in a model's folder say of the vectors that the model was trained to give.

modules.json                  the pipeline: Transformer, Pooling, Normalize
N_Pooling/config.json         which pooling
sentence_bert_config.json     the longest text, and whether to lower its case
config.json                   of a cross-encoder: the activation after its head

Format: https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.fields import Fields
from engine.loader.json_file import read_json, read_json_objects
from engine.pooling.params import PoolingType

ScoreActivation = Literal["sigmoid", "identity"]

# Version 2 to 5 of the library have one switch for each way of pooling; what has none here does not run.
_SWITCHES: dict[str, PoolingType] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_NEWER_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """How a model's vectors are made unless a request says otherwise.

    Attributes:
        pooling, normalize: As in `PoolingParams`.
        max_length: The longest prompt in tokens that the model was made for; None where the files do not say.
        lowercase: Text is put into lower case before it is tokenised.
    """

    pooling: PoolingType
    normalize: bool = True
    max_length: int | None = None
    lowercase: bool = False


def read_pooling_defaults(folder: Path, *, otherwise: PoolingType) -> PoolingDefaults:
    """Read the files in `folder`; without a modules.json the pooling is `otherwise`, and vectors are normalised.

    Raises `ModelNotSupported` for a pipeline that the engine does not run, naming the module.
    """
    path = folder / "modules.json"
    if not path.exists():
        return PoolingDefaults(otherwise)
    pooling = otherwise
    normalize = False
    for module in read_json_objects(path):
        match str(module.get("type")).rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _pooling(folder / str(module.get("path")) / "config.json")
            case "Normalize":
                normalize = True
            case name:
                raise ModelNotSupported(f"{path}: a pipeline with a module {name!r} does not run.")
    settings = folder / "sentence_bert_config.json"
    raw = read_json(settings) if settings.exists() else {}
    max_length = Fields(raw, settings).integer("max_seq_length") if raw.get("max_seq_length") is not None else None
    return PoolingDefaults(pooling, normalize, max_length, bool(raw.get("do_lower_case")))


def read_score_activation(folder: Path, num_labels: int) -> ScoreActivation:
    """Return what follows a sequence classification head: what config.json names, else as sentence-transformers does.

    That is a sigmoid for a head of one label, and nothing for one of more.
    """
    path = folder / "config.json"
    raw = read_json(path)
    # The first is where version 4 of the library and later keep it, the second where it was before.
    newer: Mapping[str, Any] = raw.get("sentence_transformers") or {}
    name = newer.get("activation_fn") or raw.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid" if num_labels == 1 else "identity"
    activation = str(name).rpartition(".")[2].lower()
    if activation not in get_args(ScoreActivation):
        raise ModelNotSupported(f"{path}: scores with activation {name!r} do not run; Sigmoid and Identity do.")
    return cast(ScoreActivation, activation)


def _pooling(path: Path) -> PoolingType:
    raw = read_json(path)
    if "pooling_mode" in raw:
        modes = raw["pooling_mode"]
        wanted = [modes] if isinstance(modes, str) else list(modes)
        known = [_NEWER_NAMES.get(mode) for mode in wanted]
    else:
        wanted = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value]
        known = [_SWITCHES.get(name) for name in wanted]
    if not wanted:
        raise ModelFileInvalid(f"{path} names no pooling.")
    if len(known) > 1 or known[0] is None:
        raise ModelNotSupported(
            f"{path}: pooling by {' and '.join(wanted)} does not run.", hint="One of mean, cls and last token does."
        )
    return cast(PoolingType, known[0])
