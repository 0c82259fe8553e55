"""From a model's name to a model that is ready to run, with its tokenizer."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.loader.assemble import assemble
from engine.loader.eos import folder_eos_token_ids, gguf_eos_token_ids
from engine.loader.errors import ModelFileInvalid
from engine.loader.gguf_file import GgufFile
from engine.loader.gguf_tokenizer import gguf_tokenizer
from engine.loader.hf_config import read_hf_config
from engine.loader.locate import locate_model
from engine.loader.sources import SafetensorsSource
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

__all__ = ["LoadedModel", "ModelFileInvalid", "load"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `tokenizer` is None for a folder without tokenizer files, which serves token ids only."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]


def load(model: str, *, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """Load `demo`, a folder, a .gguf file or a hub id; `dtype` None keeps the checkpoint's own (bfloat16 for GGUF).

    Raises ModelNotFound, ModelNotSupported or ModelFileInvalid.
    """
    path = locate_model(model)
    return _load_folder(path, dtype, device) if path.is_dir() else _load_gguf(path, dtype, device)


def _load_folder(folder: Path, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    config, family = read_hf_config(folder)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    tokenizer = _folder_tokenizer(folder)
    decoder = assemble(config, family, SafetensorsSource(folder), device)
    return LoadedModel(config, decoder, tokenizer, folder_eos_token_ids(folder, tokenizer))


def _load_gguf(path: Path, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    file = GgufFile(path)
    config, family = file.config()
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    tokenizer = gguf_tokenizer(file)
    decoder = assemble(config, family, file, device)
    return LoadedModel(config, decoder, tokenizer, gguf_eos_token_ids(file, tokenizer))


def _folder_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
        raise ModelFileInvalid(f"The tokenizer in {folder} cannot be read ({error}).") from error
