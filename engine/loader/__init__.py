"""From a model's name to a model that is ready to run, with its tokenizer."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.config import ModelImpl, Quantize
from engine.errors import ConfigError, ModelNotSupported
from engine.info import Task
from engine.loader.assemble import assemble
from engine.loader.encoder_config import is_encoder
from engine.loader.encoder_loader import LoadedEncoder, load_encoder
from engine.loader.eos import folder_eos_token_ids, gguf_eos_token_ids
from engine.loader.errors import ModelFileInvalid
from engine.loader.headless import is_headless
from engine.loader.hf_config import read_hf_config
from engine.loader.json_file import read_json
from engine.loader.locate import locate_model
from engine.loader.quantization import folder_tensors, quantization_method
from engine.loader.sentence_transformers import PoolingDefaults, read_pooling_defaults
from engine.loader.transformers_model import load_transformers_model
from engine.models.decoder import Decoder
from engine.models.fallback import FallbackDecoder
from engine.models.shape import ModelShape

__all__ = ["LoadedEncoder", "LoadedModel", "ModelFileInvalid", "load", "load_tokenizer"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory.

    `tokenizer` is None for a folder without tokenizer files, which serves token ids only. `revision` is the commit of
    the hub's repository that the files are, or None for local files. `pooling` is how an embedding is made unless a
    request says otherwise; `tasks` lacks `generate` for a decoder without its language head.
    """

    config: ModelShape
    decoder: Decoder | FallbackDecoder
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    pooling: PoolingDefaults
    tasks: tuple[Task, ...] = ("generate", "embed")
    revision: str | None = None


def load(
    model: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: Quantize | None = None,
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
) -> LoadedModel | LoadedEncoder:
    """Load `demo`, a folder, a .gguf file or a hub id; `dtype` None keeps the checkpoint's own (bfloat16 for GGUF).

    `quantize`, `model_impl` and `trust_remote_code` are those of `EngineConfig`: the last allows Python files that come
    with the model to be run; nothing runs them otherwise. `max_model_len`, the longest sequence that will be asked for,
    settles rotary embeddings that depend on the length; None is the context that the model has without stretching.
    Raises ModelNotFound, ModelNotSupported or ModelFileInvalid, and ConfigError for an encoder to be quantised.
    """
    path, revision = locate_model(model, with_code=trust_remote_code)
    if path.is_dir() and is_encoder(path) and model_impl != "transformers":
        if quantize:
            raise ConfigError(f"quantize is for decoders, and {model} is an encoder.", hint="Leave it out.")
        encoder = load_encoder(path, _folder_tokenizer(path, trust_remote_code), dtype, device)
        return dataclasses.replace(encoder, revision=revision)
    if path.is_dir():
        loaded = _load_folder(path, dtype, device, quantize, model_impl, trust_remote_code, max_model_len)
    elif model_impl == "transformers":
        raise ModelNotSupported(f"{path}: GGUF files run by the engine's own code only, not by Transformers'.")
    else:
        loaded = _load_gguf(path, dtype, device, quantize)
    return dataclasses.replace(loaded, revision=revision)


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of what `model` names, without its weights, or None if it has none.

    Raises what `load` does.
    """
    path, _ = locate_model(model, with_code=trust_remote_code)
    if path.is_dir():
        return _folder_tokenizer(path, trust_remote_code)
    from engine.loader.gguf_file import GgufFile
    from engine.loader.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(GgufFile(path))


def _load_folder(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: Quantize | None,
    model_impl: ModelImpl,
    trust_remote_code: bool,
    max_model_len: int | None,
) -> LoadedModel:
    tokenizer = _folder_tokenizer(folder, trust_remote_code)
    decoder = _folder_decoder(folder, dtype, device, quantize, model_impl, trust_remote_code, max_model_len)
    return LoadedModel(
        decoder.config,
        decoder,
        tokenizer,
        folder_eos_token_ids(folder, tokenizer),
        read_pooling_defaults(folder, otherwise="last"),
        tasks=("embed",) if is_headless(folder) else ("generate", "embed"),
    )


def _folder_decoder(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: Quantize | None,
    model_impl: ModelImpl,
    trust_remote_code: bool,
    max_model_len: int | None,
) -> Decoder | FallbackDecoder:
    if model_impl == "transformers":
        return load_transformers_model(folder, dtype, device, trust_remote_code=trust_remote_code)
    try:
        config, family = read_hf_config(folder, max_model_len)
        # A body alone has no head's weights, and nobody asks for its logits: the embedding stands in for them.
        tied = config.tie_word_embeddings or is_headless(folder)
        config = dataclasses.replace(config, dtype=dtype or config.dtype, tie_word_embeddings=tied)
        return assemble(config, family, folder_tensors(folder, config.dtype), device, quantize)
    except ModelNotSupported:
        # Transformers' code runs no quantised weights here, and the reason would be lost.
        if model_impl == "native" or quantize or quantization_method(read_json(folder / "config.json")):
            raise
        return load_transformers_model(folder, dtype, device, trust_remote_code=trust_remote_code)


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device, quantize: Quantize | None) -> LoadedModel:
    # Folders are loaded where gguf is not installed.
    from engine.loader.gguf_config import read_gguf_config
    from engine.loader.gguf_file import GgufFile
    from engine.loader.gguf_tokenizer import gguf_tokenizer

    file = GgufFile(path)
    config, family = read_gguf_config(file)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    tokenizer = gguf_tokenizer(file)
    decoder = assemble(config, family, file, device, quantize)
    return LoadedModel(config, decoder, tokenizer, gguf_eos_token_ids(file, tokenizer), PoolingDefaults("last"))


def _folder_tokenizer(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        raise ModelFileInvalid(f"The tokenizer in {folder} cannot be read ({error}).") from error
