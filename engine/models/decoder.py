"""One decoder for all families: the flat mixed batch of a step in, hidden states and logits out."""

from torch import Tensor

from engine.models.config import ModelConfig
from kernels.ops import AttentionBatch, KVCache


class Decoder:
    """A decoder-only model with its weights, on one device."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """Return the final hidden states `[num_tokens, hidden_size]`, and write this step's keys and values to `kv`.

        token_ids and positions are `[num_tokens]` int64, in the order of `batch`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[num_rows, vocab_size]` float32 logits of final hidden states `[num_rows, hidden_size]`."""
        raise NotImplementedError
