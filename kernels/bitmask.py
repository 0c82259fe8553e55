"""Which tokens may follow, one bit a token: applied to logits."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# Unpacked to one number a token. For all rows at once that would be as much memory as the logits, and out of the cache.
_ROWS_AT_A_TIME = 32


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set to -inf, in place, the logits of all tokens that are not allowed; what is NaN stays NaN.

    logits `[R, vocab_size]`, floating point; rows `[G]` int64, ascending, are the rows that have a mask; bitmask
    `[G, W]` int32: token `t` is allowed in row `rows[g]` if bit `t % 32` of `bitmask[g, t // 32]` is 1. Tokens from
    `32 * W` on are not allowed.
    """
    caps_of_byte = _caps_of_byte(logits)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        chunk = slice(start, start + _ROWS_AT_A_TIME)
        caps = _unpack(bitmask[chunk], caps_of_byte, logits.shape[1])
        if len(rows) == len(logits):
            torch.minimum(logits[chunk], caps, out=logits[chunk])
        else:
            logits[rows[chunk]] = torch.minimum(logits[rows[chunk]], caps, out=caps)


def _caps_of_byte(logits: Tensor) -> Tensor:
    """For each value of a byte, what its eight tokens' logits can be at most: `[256, 8]`, inf where a bit is 1."""
    bits = torch.arange(256, device=logits.device).unsqueeze(1) >> torch.arange(8, device=logits.device) & 1
    return torch.where(bits == 1, math.inf, -math.inf).to(logits.dtype)


def _unpack(bitmask: Tensor, caps_of_byte: Tensor, vocab_size: int) -> Tensor:
    # A look-up and a minimum are vectorised where shifting bits and filling by a mask of booleans are not. All machines
    # that torch runs on store a word's lowest byte first.
    bytes_ = bitmask.contiguous().view(torch.uint8)
    caps = caps_of_byte.index_select(0, bytes_.flatten().int()).view(len(bitmask), -1)[:, :vocab_size]
    return F.pad(caps, (0, vocab_size - caps.shape[1]), value=-math.inf)
