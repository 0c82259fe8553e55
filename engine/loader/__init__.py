"""From a model's name to a model that is ready to run, with its tokenizer."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder


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
    raise NotImplementedError
