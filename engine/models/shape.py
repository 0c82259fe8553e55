"""What the engine has to know of any model that it runs, whoever computes it."""

from typing import Protocol

import torch


class ModelShape(Protocol):
    """The sizes that batches and the KV cache are made from; `engine.models.config.ModelConfig` is one.

    `num_layers` counts the attention layers, each of which keeps `num_kv_heads` keys and values of `head_dim`.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...
