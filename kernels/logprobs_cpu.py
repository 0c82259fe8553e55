"""Log-probabilities of chosen tokens, their ranks, and the likeliest tokens, on a CPU: without sorting whole rows."""

from torch import Tensor

from kernels.reference_sampling import Likeliest, LogprobTensors


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """As `kernels.reference_sampling.token_logprobs`."""
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, token_ids[:, None])
    ranks = (log_probs > chosen).sum(dim=-1) + 1
    return LogprobTensors(chosen[:, 0], ranks, *likeliest(log_probs, num_top))


def likeliest(scores: Tensor, count: int) -> Likeliest:
    """As `kernels.reference_sampling.likeliest`."""
    count = min(count, scores.shape[-1])
    values, token_ids = scores.topk(count, dim=-1)
    if count == 0:
        return Likeliest(values, token_ids)
    # topk leaves open which of equals it takes, and in which order.
    _take_first_of_equals(scores, values[:, -1:], token_ids)
    token_ids = token_ids.sort(dim=-1).values
    values, order = scores.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return Likeliest(values, token_ids.gather(1, order))


def _take_first_of_equals(scores: Tensor, floor: Tensor, token_ids: Tensor) -> None:
    """Correct `token_ids` `[R, count]` in rows in which more tokens than fit reach the floor `[R, 1]`."""
    count = token_ids.shape[1]
    for row in ((scores >= floor).sum(dim=-1) > count).nonzero().flatten().tolist():
        candidates = (scores[row] >= floor[row]).nonzero().flatten()
        first = scores[row, candidates].argsort(descending=True, stable=True)[:count]
        token_ids[row] = candidates[first]
