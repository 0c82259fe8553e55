"""Tiny random-weight models in a folder, as Transformers saves them: for parity tests and for driving the engine."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama(path: Path, *, seed: int = 0, tokenizer: bool = False, **config: Any) -> Path:
    """Save a random Llama of two small layers under `path` and return `path`; `config` overrides LlamaConfig fields."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **config}))
    return _save(model, path, tokenizer)


def tiny_mistral(path: Path, *, seed: int = 0, tokenizer: bool = False, **config: Any) -> Path:
    """Save a random Mistral (no sliding window) under `path` and return `path`."""
    torch.manual_seed(seed)
    model = MistralForCausalLM(MistralConfig(**{**TINY, "sliding_window": None, **config}))
    return _save(model, path, tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and four special tokens, ids 256 to 259, with a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _save(model: LlamaForCausalLM | MistralForCausalLM, path: Path, tokenizer: bool) -> Path:
    # Wider than the usual 0.02, so that logits differ enough for greedy choices to be clear.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    if tokenizer:
        byte_tokenizer().save_pretrained(path)
    return path
