"""Tiny random-weight models in a folder, as Transformers saves them: for parity tests and for driving the engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from engine.models.decoder import Decoder
from kernels.ops import allocate_kv_cache
from tests.kernels.batches import Chunk, flat_batch

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


def poison(path: Path) -> int:
    """Make the embedding of a saved model's last token NaN, and return the token: it and all after it are NaN."""
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[-1] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return len(embedding) - 1


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


class PagedRun:
    """A decoder with a KV cache of its own, fed chunk by chunk: what the engine's loop does, without the loop."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int = 64, block_size: int = 16, kv_dtype: torch.dtype | None = None
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.block_size = block_size
        self.kv = allocate_kv_cache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype or config.dtype,
            torch.device("cpu"),
        )
        # Handed out from the end, so that no block table is in order.
        self._free = list(range(1, num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """Compute the next tokens of named sequences in one step; return their logits `[num_tokens, vocab_size]`."""
        chunks = []
        for name, ids in tokens.items():
            start = self._lengths.get(name, 0)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < start + len(ids):
                blocks.append(self._free.pop())
            chunks.append(Chunk(tuple(blocks), start, len(ids)))
            self._lengths[name] = start + len(ids)
        positions = torch.cat([torch.arange(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks])
        flat = torch.tensor([token for ids in tokens.values() for token in ids])
        hidden = self.decoder.forward(flat, positions, flat_batch(chunks, self.block_size), self.kv)
        logits = self.decoder.logits(hidden)
        return dict(zip(tokens, logits.split([chunk.num_tokens for chunk in chunks]), strict=True))


def check_same_bits_in_any_company(
    decoder: Decoder, rows: Mapping[str, Sequence[int]], kv_dtype: torch.dtype | None = None
) -> None:
    """Each row's logits are the same to the bit with all others, alone, and with its prompt cut in two."""
    together = PagedRun(decoder, num_blocks=200, kv_dtype=kv_dtype)
    prompts = together.step({name: ids[:-1] for name, ids in rows.items()})
    decoded = together.step({name: ids[-1:] for name, ids in rows.items()})
    for name, ids in rows.items():
        alone = PagedRun(decoder, kv_dtype=kv_dtype)
        logits = [alone.step({name: part})[name] for part in (ids[:9], ids[9:-1], ids[-1:])]
        assert torch.equal(torch.cat(logits), torch.cat([prompts[name], decoded[name]])), name
