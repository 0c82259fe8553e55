"""From a folder to a model that Transformers computes, refused by name if paged attention cannot serve it.

What the configuration and the class say is looked at before a weight is read; then one token runs through the model to
see how it attends, and two short prompts are compared with Transformers' own attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from engine.errors import ModelNotSupported
from engine.loader.errors import ModelFileInvalid
from engine.loader.json_file import read_json
from engine.loader.quantization import quantization_method
from engine.loader.sources import SafetensorsSource
from engine.models.fallback import PAGED_ATTENTION, CannotPage, FallbackConfig, FallbackDecoder
from engine.models.fallback_check import check_against_eager
from engine.models.fallback_probe import probe_attention

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Their frequencies depend on the longest position of a forward pass, so that sequences of one step change each other.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CUSTOM_CODE = "AutoModelForCausalLM"
_NAMES_SHOWN = 5


def load_transformers_model(
    folder: Path, dtype: torch.dtype | None, device: torch.device, *, trust_remote_code: bool
) -> FallbackDecoder:
    """Load the model of `folder`; `dtype` None keeps the checkpoint's own.

    With `trust_remote_code`, modelling code that the folder holds is run. On a CPU, weights that are wanted in the
    file's own dtype stay mapped, so the files must not be overwritten while the model is in use.
    Raises `ModelNotSupported` saying what of the model cannot run, and `ModelFileInvalid` if its files are not whole.
    """
    config = _read_config(folder, trust_remote_code)
    name, model_class = _model_class(folder, config, trust_remote_code)
    if reason := _unsupported(config, model_class):
        raise ModelNotSupported(f"{folder}: {name} does not run: {reason}.")
    model = _read_weights(folder, config, model_class, dtype or _own_dtype(folder, config)).to(device)
    try:
        decoder = _with_paged_attention(name, model)
        check_against_eager(model, decoder)
    except CannotPage as error:
        raise ModelNotSupported(f"{folder}: {name} does not run: {error}.") from error
    return decoder


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    path = folder / "config.json"
    raw = read_json(path)
    named = ", ".join(map(str, raw.get("architectures") or ())) or f"model type {raw.get('model_type')!r}"
    if method := quantization_method(raw):
        raise ModelNotSupported(
            f"{path}: weights quantised with {method} do not run in {named} by Transformers' own code.",
            hint="Take the unquantised model.",
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        if raw.get("auto_map") and not trust_remote_code:
            raise _untrusted(path, named) from error
        reason = str(error).strip().splitlines()[0]
        raise ModelNotSupported(f"{path} describes {named}, which Transformers cannot read ({reason}).") from error


def _untrusted(path: Path, named: str) -> ModelNotSupported:
    return ModelNotSupported(
        f"{path} describes {named}, which runs only with code of its own.",
        hint="Read the .py files beside it; if you trust them, set trust_remote_code.",
    )


def _model_class(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> tuple[str, type[PreTrainedModel]]:
    named = (config.architectures or [f"model type {config.model_type!r}"])[0]
    auto_map = read_json(folder / "config.json").get("auto_map") or {}
    if _CUSTOM_CODE in auto_map and trust_remote_code:
        try:
            return named, get_class_from_dynamic_module(auto_map[_CUSTOM_CODE], folder, local_files_only=True)
        except (OSError, ImportError, AttributeError, SyntaxError, ValueError) as error:
            raise ModelFileInvalid(f"{folder}: its code for {named} cannot be loaded ({error}).") from error
    if config.is_encoder_decoder:
        raise ModelNotSupported(f"{folder}: {named} does not run: it is an encoder and a decoder.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if _CUSTOM_CODE in auto_map:
            raise _untrusted(folder / "config.json", named)
        raise ModelNotSupported(f"{folder}: {named} does not run: Transformers has no causal language model of it.")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.architectures and model_class.__name__ not in config.architectures:
        raise ModelNotSupported(
            f"{folder}: {named} does not run: as a causal language model the same weights are {model_class.__name__}."
        )
    return named, model_class


def _unsupported(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """Say why paged attention cannot serve the model, as half a sentence, as far as its description tells."""
    fields: dict[str, Any] = config.to_dict()
    if config.is_encoder_decoder:
        return "it is an encoder and a decoder"
    if config.get_text_config() is not config:
        return "it reads more than text"
    if model_class._is_stateful:
        return "it keeps a recurrent state"
    if kinds := sorted(set(fields.get("layer_types") or ()) - set(_LAYER_TYPES)):
        return f"it has layers of type {', '.join(kinds)}"
    if not model_class._supports_attention_backend:
        return "its attention does not go through Transformers' attention interface"
    for rope_type in _rope_types(fields.get("rope_parameters")):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            return f"its rotary embedding of type {rope_type!r} depends on the longest sequence of a step"
    return None


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the types in a configuration's rope parameters, which are one object, or one for each type of layer."""
    if isinstance(parameters, dict):
        if isinstance(kind := parameters.get("rope_type"), str):
            yield kind
        for value in parameters.values():
            yield from _rope_types(value)


def _own_dtype(folder: Path, config: PretrainedConfig) -> torch.dtype:
    dtype = config.dtype or torch.float32
    if dtype not in _DTYPES:
        raise ModelNotSupported(f"{folder / 'config.json'}: dtype {dtype} is none that the engine computes in.")
    return dtype


def _read_weights(
    folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype
) -> PreTrainedModel:
    SafetensorsSource(folder)  # says what is wrong with the files in our own words
    try:
        with _no_progress_bars():
            model, loading = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=PAGED_ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise ModelFileInvalid(f"The weights in {folder} cannot be loaded ({error}).") from error
    if missing := sorted(loading["missing_keys"]):
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise ModelFileInvalid(f"{folder} lacks tensors: {', '.join(missing[:_NAMES_SHOWN])}{more}.")
    return model


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _with_paged_attention(name: str, model: PreTrainedModel) -> FallbackDecoder:
    try:
        longest, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
        hidden_size = model.config.hidden_size
    except AttributeError as error:
        raise CannotPage(f"its configuration does not say how large it is ({error})") from error
    probed = probe_attention(model, longest)
    config = FallbackConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=longest,
        num_layers=len(probed.layers),
        num_heads=probed.num_heads,
        num_kv_heads=probed.num_kv_heads,
        head_dim=probed.head_dim,
        dtype=model.dtype,
    )
    return FallbackDecoder(model, config, probed.layers)
