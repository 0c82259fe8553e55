"""Which tokens end a sequence."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from engine.loader.json_file import read_json

if TYPE_CHECKING:
    from engine.loader.gguf_file import GgufFile

# Tokens that end a turn in the chat templates of known families; models' own lists do not always name them.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def folder_eos_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Join what generation_config.json, config.json, the tokenizer and its chat template name."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            ids |= _as_ids(read_json(folder / name).get("eos_token_id"))
    return frozenset(ids | _tokenizer_ids(tokenizer))


def gguf_eos_token_ids(file: "GgufFile", tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Join what the metadata, the tokenizer and its chat template name."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return frozenset(_as_ids([file.metadata(key) for key in keys]) | _tokenizer_ids(tokenizer))


def _as_ids(value: object) -> set[int]:
    values: Iterable[object] = value if isinstance(value, list) else (value,)
    return {item for item in values if isinstance(item, int)}


def _tokenizer_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    if tokenizer is None:
        return set()
    ids = _as_ids(tokenizer.eos_token_id)
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, dict) else (template or "",)
    added = tokenizer.get_added_vocab()
    return ids | {added[token] for token in _END_OF_TURN if token in added and any(token in t for t in templates)}
