"""LoRA adapters in the PEFT library's file format: adapter_config.json and adapter_model.safetensors in a folder.

What an adapter changes is read from its tensors, not from `target_modules`: the names of the file decide. The formats
are those of PEFT 0.21's `LoraConfig` and `get_peft_model_state_dict`; what changes the arithmetic in another way than
two low-rank factors is refused by its name.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download

# HTTPError is the base of the errors of the client's HTTP library, which is another one in each of its major versions.
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from engine.errors import RequestError
from engine.lora import FileStamp, LoadedAdapter
from engine.models.adapters import Place, Projection
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES, linear_parts
from kernels.lora import LoraShape, LowRank, StagedFactors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")

# Fields of LoraConfig that, when set, make an adapter more than two factors beside a linear layer.
_UNSUPPORTED_FIELDS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Initialisations that took the factors' product out of the base model's weights, which are not the ones loaded here.
_CHANGED_BASES = ("corda", "loftq", "lora_ga", "olora", "pissa")


# A GGUF file has names of its own, but adapters are made from Transformers' model of the same family; most are named
# like Llama's.
_MADE_FROM = {"phi3": "Phi3ForCausalLM"}


class AdapterTarget(NamedTuple):
    """A linear layer of a checkpoint, as the decoder has it: outputs `start` to `stop` of a fused projection."""

    layer: int
    projection: Projection
    start: int
    stop: int
    in_features: int


def adapter_targets(config: ModelConfig) -> dict[str, AdapterTarget]:
    """Return the linear layers that adapters can change, by the name of the module in Transformers' model."""
    architecture = config.architecture
    if architecture not in FAMILIES:
        architecture = _MADE_FROM.get(architecture, "LlamaForCausalLM")
    family = FAMILIES[architecture]
    return {
        part.module: AdapterTarget(layer, part.projection, part.start, part.stop, part.in_features)
        for names in (family.names, *family.other_names)
        for layer in range(config.num_layers)
        for part in linear_parts(config, names, layer)
    }


def adapter_shapes(targets: Mapping[str, AdapterTarget]) -> dict[Place, LoraShape]:
    """Return the projections to which these belong, each cut into slices wherever one of them ends."""
    ends: defaultdict[Place, set[int]] = defaultdict(set)
    in_features = {}
    for target in targets.values():
        place = target.layer, target.projection
        ends[place].add(target.stop)
        in_features[place] = target.in_features
    return {
        place: LoraShape(in_features[place], tuple(stop - start for start, stop in pairwise([0, *sorted(stops)])))
        for place, stops in ends.items()
    }


class PeftLoader:
    """Reads adapters of one base model, in its dtype; `stage` prepares the factors of a projection for its device."""

    def __init__(
        self,
        targets: Mapping[str, AdapterTarget],
        stage: Callable[[Sequence[LowRank]], StagedFactors],
        *,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._targets = targets
        self._stage = stage
        self._max_rank = max_rank
        self._dtype = dtype

    def load(self, name: str) -> LoadedAdapter:
        """Load the adapter in a folder, or of a hub id with an optional `@revision`.

        Raises `RequestError` with field `lora`: code `lora_not_found` if there is none of that name, `invalid_lora`
        if it does not fit the base model or is not supported, `out_of_memory` if the device has no room for it.
        """
        folder = _locate(name)
        try:
            return self._load(folder)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RequestError(
                f"There is no memory left for the adapter in {folder} ({error}).",
                code="out_of_memory",
                field="lora",
                hint="Lower max_loras, or the size of the KV pool.",
            ) from error

    def _load(self, folder: Path) -> LoadedAdapter:
        config_path, weights_path = folder / CONFIG_FILE, folder / WEIGHTS_FILE
        config_stamp, config_bytes = _read(config_path)
        weights_stamp, weights_bytes = _read(weights_path)
        config = _PeftConfig(_parse(config_bytes, config_path), config_path)
        pairs = self._pairs(_tensors(weights_bytes, weights_path), config, weights_path)
        factors = {place: self._stage(parts) for place, parts in pairs.items()}
        digest = blake2b(config_bytes, digest_size=16).digest()
        revision = blake2b(weights_bytes, key=digest, digest_size=16).digest()
        return LoadedAdapter(revision, (config_stamp, weights_stamp), factors)

    def _pairs(self, tensors: Mapping[str, Tensor], config: "_PeftConfig", path: Path) -> dict[Place, list[LowRank]]:
        factors: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise _invalid(f"{path}: tensor {name} is no factor of a linear layer.", _explain(name))
            factors[match["module"]][match["factor"]] = tensor
        if not factors:
            raise _invalid(f"{path} holds no tensors.")
        pairs: defaultdict[Place, list[LowRank]] = defaultdict(list)
        for module, pair in factors.items():
            target = self._targets.get(module)
            if target is None:
                raise _invalid(
                    f"{path} changes {module}, which is no linear layer of this model that takes adapters.",
                    f"Those that do are named like {', '.join(self._first_layer())}.",
                )
            pairs[target.layer, target.projection].append(self._pair(module, pair, target, config, path))
        return pairs

    def _first_layer(self) -> list[str]:
        return [module for module, target in self._targets.items() if target.layer == 0]

    def _pair(
        self, module: str, pair: Mapping[str, Tensor], target: AdapterTarget, config: "_PeftConfig", path: Path
    ) -> LowRank:
        if len(pair) != 2:
            raise _invalid(f"{path} has lora_{next(iter(pair))} of {module} without its counterpart.")
        rank, scaling = config.rank(module), config.scaling(module)
        if rank > self._max_rank:
            raise _invalid(f"{path}: {module} has rank {rank}, above max_lora_rank ({self._max_rank}).")
        expected = {"A": (rank, target.in_features), "B": (target.stop - target.start, rank)}
        for factor, shape in expected.items():
            if pair[factor].shape != shape:
                raise _invalid(
                    f"{path}: lora_{factor} of {module} is {tuple(pair[factor].shape)}, but {shape} is what the base "
                    f"model and the configuration's rank ask for.",
                    "Is the adapter of another base model?",
                )
            if not pair[factor].is_floating_point():
                raise _invalid(f"{path}: lora_{factor} of {module} is {pair[factor].dtype}, not floating point.")
        return LowRank(
            pair["A"].to(self._dtype),
            (pair["B"].float() * scaling).to(self._dtype),
            target.start,
            target.stop,
        )


class _PeftConfig:
    """What an adapter_config.json says about ranks and scaling. Raises `RequestError` for all but plain LoRA."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw = raw
        self._path = path
        self._refuse_unsupported()
        self._rank = self._positive("r", raw.get("r"))
        self._alpha = self._positive("lora_alpha", raw.get("lora_alpha"))
        self._rank_pattern = self._pattern("rank_pattern")
        self._alpha_pattern = self._pattern("alpha_pattern")

    def rank(self, module: str) -> int:
        rank = _matching(self._rank_pattern, module, self._rank)
        if rank != int(rank):
            raise _invalid(f"{self._path}: the rank of {module} is {rank}, not an integer.")
        return int(rank)

    def scaling(self, module: str) -> float:
        """What the product of the factors is multiplied by: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
        rank = self.rank(module)
        return _matching(self._alpha_pattern, module, self._alpha) / (
            math.sqrt(rank) if self._raw.get("use_rslora") else rank
        )

    def _refuse_unsupported(self) -> None:
        raw, path = self._raw, self._path
        if (kind := raw.get("peft_type")) != "LORA":
            raise _invalid(f"{path}: adapters of type {kind!r} do not run.", "Those of peft_type LORA do.")
        for field in _UNSUPPORTED_FIELDS:
            if value := raw.get(field):
                raise _invalid(f"{path}: {field} ({value!r}) does not run.", "Merge the adapter into the base model.")
        if (bias := raw.get("bias", "none")) != "none":
            raise _invalid(f"{path}: trained biases (bias {bias!r}) do not run.", "Merge the adapter.")
        start = raw.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
            raise _invalid(
                f"{path}: with init_lora_weights {start!r} the adapter belongs to changed base weights.",
                "PEFT converts it to plain LoRA: save_pretrained with path_initial_model_for_weight_conversion.",
            )

    def _pattern(self, field: str) -> dict[re.Pattern[str], float]:
        raw = self._raw.get(field) or {}
        if not isinstance(raw, dict):
            raise _invalid(f"{self._path}: {field} is {raw!r}, not an object.")
        try:
            # As PEFT reads its keys: the end of a module's name, from a dot on, or a regular expression of it.
            return {
                re.compile(rf"(.*\.)?({key})$"): self._positive(f"{field}[{key!r}]", value)
                for key, value in raw.items()
            }
        except re.error as error:
            raise _invalid(f"{self._path}: {field} has a key that is no regular expression ({error}).") from error

    def _positive(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise _invalid(f"{self._path}: {field} is {value!r}, not a positive number.")
        return value


def _matching(pattern: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    return next((value for key, value in pattern.items() if key.match(module)), default)


def _locate(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    looks_like_path = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_like_path or folder.is_file():
        raise _not_found(f"There is no folder {name}.", f"An adapter is a folder with {CONFIG_FILE}, or a hub id.")
    repository, _, revision = name.partition("@")
    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
        )
    except (HFValidationError, HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _not_found(
            f"{name!r} is no folder here, and could not be fetched as a hub id ({reason}).",
            "Check the name, HF_TOKEN for gated adapters, and the network; or give a local path.",
        ) from error


def _read(path: Path) -> tuple[FileStamp, bytes]:
    try:
        # Stamped before it is read, so that a change in between is seen as one.
        return FileStamp.of(path), path.read_bytes()
    except FileNotFoundError as error:
        pickled = path.with_suffix(".bin")
        if path.name == WEIGHTS_FILE and pickled.exists():
            raise _invalid(
                f"{path.parent} holds its weights as {pickled.name}.",
                "Pickled weights can run code and are never loaded: convert them to safetensors.",
            ) from error
        raise _not_found(f"The folder {path.parent} holds no {path.name}.") from error
    except OSError as error:
        raise _invalid(f"{path} cannot be read ({error}).") from error


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _invalid(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise _invalid(f"{path} holds {type(value).__name__}, not an object.")
    return value


def _tensors(content: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return load_safetensors(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch has no name for
        raise _invalid(f"{path} is corrupt or truncated ({error}).", "Fetch it again.") from error


def _explain(tensor: str) -> str:
    if "lora_magnitude_vector" in tensor:
        return "It is DoRA's, which does not run."
    if "lora_embedding_" in tensor:
        return "Adapters of embeddings do not run."
    return "Only the decoder's linear layers take adapters; merge this one into the base model."


def _invalid(message: str, hint: str = "") -> RequestError:
    return RequestError(message, code="invalid_lora", field="lora", hint=hint)


def _not_found(message: str, hint: str = "") -> RequestError:
    return RequestError(message, code="lora_not_found", field="lora", hint=hint)
