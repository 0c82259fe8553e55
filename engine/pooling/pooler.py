"""From the hidden states of a prompt's tokens to one vector.

A prompt's vector is a sum over some of its tokens: all (`mean`), the first (`cls`) or the last (`last`). A step adds up
those of its own chunk, so that a prompt may be computed in any number of chunks; the end divides and normalises.

hidden states of a step   A: tokens 0 1 2      B: tokens 4 5 6, the last three of seven
mean                      a0 + a1 + a2         b4 + b5 + b6
cls                       a0                   nothing: it was in an earlier step
last                      nothing yet, or a2   b6
"""

from collections.abc import Callable

import numpy as np

from engine.pooling.params import PoolingType

Activation = Callable[[np.ndarray], np.ndarray]


class Pooler:
    """Gathers the vector of one prompt over the steps that compute it."""

    def __init__(
        self,
        pooling: PoolingType,
        *,
        normalize: bool = False,
        dimensions: int | None = None,
        activation: Activation | None = None,
    ) -> None:
        self.pooling = pooling
        self._normalize = normalize
        self._dimensions = dimensions
        self._activation = activation
        self._sum: np.ndarray | None = None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens that are found in the prefix cache, and not computed, would be missed."""
        return self.pooling != "last"

    def wanted(self, start: int, num_tokens: int, prompt_length: int) -> range:
        """Which tokens of a chunk, counted from its first, are part of the sum; the chunk begins at token `start`."""
        match self.pooling:
            case "mean":
                return range(num_tokens)
            case "cls":
                return range(1 if start == 0 else 0)
            case "last":
                return range(num_tokens - 1 if start + num_tokens == prompt_length else num_tokens, num_tokens)

    def add(self, part: np.ndarray) -> None:
        """Enter what one step summed, `[size]` float32."""
        self._sum = part if self._sum is None else self._sum + part

    def reset(self) -> None:
        """Forget all steps: the prompt will be computed again."""
        self._sum = None

    def vector(self, prompt_length: int) -> np.ndarray:
        """Return the finished vector, float32; every token that is wanted has been added by now."""
        if self._sum is None:
            raise RuntimeError("a vector was asked of a prompt that no step has computed")
        vector = self._sum / np.float32(prompt_length) if self.pooling == "mean" else self._sum
        # A copy: a row of a step's sums would keep all of them in memory for as long as it lives.
        vector = vector[: self._dimensions].copy()
        if self._activation:
            vector = self._activation(vector)
        if self._normalize and (length := np.linalg.norm(vector)) > 0:
            vector = vector / length
        return vector


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Each logit's logistic function, in float32, without overflow at any size."""
    return np.float32(0.5) * (np.tanh(np.float32(0.5) * logits) + np.float32(1))
