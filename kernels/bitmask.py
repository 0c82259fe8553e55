"""Which tokens may follow, one bit a token: applied to logits."""

import math

import torch
from torch import Tensor


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set to -inf, in place, the logits of all tokens that are not allowed.

    logits `[R, vocab_size]`, floating point; rows `[G]` int64, ascending, are the rows that have a mask; bitmask
    `[G, W]` int32: token `t` is allowed in row `rows[g]` if bit `t % 32` of `bitmask[g, t // 32]` is 1. Tokens from
    `32 * W` on are not allowed.
    """
    num_rows, vocab_size = logits.shape
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    # Bytes instead of words: a quarter of the memory. Every machine that torch runs on stores the lowest byte first.
    allowed = bitmask.view(torch.uint8).unsqueeze(-1).bitwise_and(bits).flatten(1)[:, :vocab_size]
    forbidden = allowed == 0
    if forbidden.shape[1] < vocab_size:
        forbidden = torch.nn.functional.pad(forbidden, (0, vocab_size - forbidden.shape[1]), value=True)
    if len(rows) == num_rows:
        logits.masked_fill_(forbidden, -math.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)
