"""How well texts go together: from a cross-encoder's outputs, or from the embeddings of each text."""

from collections.abc import Iterable, Mapping

import numpy as np

from engine.errors import RequestError
from engine.outputs import PoolingOutput, ScoreOutput


def head_scores(outputs: Iterable[PoolingOutput]) -> list[ScoreOutput]:
    """What a cross-encoder said of each pair; an error for a head of several labels, which are no score."""
    return [_head_score(output) for output in outputs]


def cosine_scores(pairs: Iterable[tuple[str, str]], embeddings: Mapping[str, PoolingOutput]) -> list[ScoreOutput]:
    """The cosine of the angle between the embeddings of each pair of texts; an error if one has none."""
    return [_cosine_score(index, embeddings[first], embeddings[second]) for index, (first, second) in enumerate(pairs)]


def _head_score(output: PoolingOutput) -> ScoreOutput:
    error = output.error
    if error is None and len(output.data) != 1:
        error = RequestError(
            f"The model's classification head has {len(output.data)} labels, which are no score.",
            code="unsupported_task",
            hint="Load a cross-encoder, whose head has one label.",
        )
    score = None if error else float(output.data[0])
    return ScoreOutput(output.index, score, len(output.prompt_token_ids), error)


def _cosine_score(index: int, first: PoolingOutput, second: PoolingOutput) -> ScoreOutput:
    num_tokens = len(first.prompt_token_ids) + len(second.prompt_token_ids)
    if error := first.error or second.error:
        return ScoreOutput(index, None, num_tokens, error)
    lengths = float(np.linalg.norm(first.data) * np.linalg.norm(second.data))
    return ScoreOutput(index, float(first.data @ second.data) / lengths if lengths else 0.0, num_tokens)
