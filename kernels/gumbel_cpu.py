"""Draws by Gumbel noise on a CPU: all of the noise's random words, and the logarithms of a handful of them.

    scores less the largest     words of Philox         which can win?        noise, exactly, of those
    0 -1.2 -3.1 -0.4 -9 ...     one for each token      word below a bound    2.1 -0.3 ... ──► argmax

The noise of a token falls as its word rises. Once one token's score and noise are known, any other needs a word below
`2^32 * exp(its score - their sum)` to beat it, which about one token in all has. Where rules left few tokens of the
vocabulary, not even the words of the others are computed.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels.reference import PHILOX_MULTIPLIERS, PHILOX_WEYL, gumbel_of_words

_WORD = 0xFFFFFFFF
_WORDS_A_COUNTER = 4
# What float32 may lose between a bound and the noise that it stands for.
_SLACK = 1.001
# Rows with fewer tokens than one in so many are drawn from a list of tokens instead of from the whole vocabulary.
_SPARSE = 8


def gumbel_argmax(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row, as `kernels.reference.gumbel_argmax` defines it."""
    wide = logits.float()
    scores = (wide - wide.amax(dim=-1, keepdim=True)).div_(temperatures.unsqueeze(1))
    rows = list(zip(scores.numpy(), seeds.tolist(), positions.tolist(), strict=True))
    threads = min(len(rows), torch.get_num_threads())
    drawn = map(_draw, rows) if threads == 1 else _pool(threads).map(_draw, rows, chunksize=1)
    return torch.tensor(list(drawn))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    # numpy lets go of the interpreter's lock within each of its loops.
    return ThreadPoolExecutor(threads, thread_name_prefix="gumbel")


def _draw(row: tuple[np.ndarray, int, int]) -> int:
    scores, seed, position = row
    kept = np.flatnonzero(scores > -np.inf)
    if not len(kept):
        return 0  # whoever asks knows that such a row has no token
    if len(kept) * _SPARSE < len(scores):
        counters, place = np.unique(kept // _WORDS_A_COUNTER, return_inverse=True)
        words = _philox(counters.astype(np.uint32), seed, position)[place, kept % _WORDS_A_COUNTER]
        return int(kept[_argmax(scores[kept], words)])
    counters = np.arange(-(-len(scores) // _WORDS_A_COUNTER), dtype=np.uint32)
    return _argmax(scores, _philox(counters, seed, position).ravel()[: len(scores)])


def _argmax(scores: np.ndarray, words: np.ndarray) -> int:
    """Return the place of the largest score plus noise; scores `[n]` float32, words `[n]` uint32."""
    best = int(scores.argmax())
    to_beat = float(scores[best]) + float(_noise(words[best : best + 1])[0])
    with np.errstate(over="ignore"):
        bounds = np.exp(scores - np.float32(to_beat)) * np.float32(_SLACK * 2.0**32)
    candidates = np.flatnonzero(words <= np.maximum(bounds, 1))
    return int(candidates[(scores[candidates] + _noise(words[candidates])).argmax()])


def _noise(words: np.ndarray) -> np.ndarray:
    noise: np.ndarray = gumbel_of_words(torch.from_numpy(words.astype(np.int64))).numpy()
    return noise


def _philox(counters: np.ndarray, seed: int, position: int) -> np.ndarray:
    """Return the words of Philox-4x32-10 for the counters `(counters, position, 0)`, `[n, 4]` uint32.

    Products of 64 bits are read as pairs of words where they lie, high and low, which costs no operation.
    """
    size = len(counters)
    c0, c2 = counters.copy(), np.full(size, position >> 32 & _WORD, np.uint32)
    c1, c3 = np.full(size, position & _WORD, np.uint32), np.zeros(size, np.uint32)
    keys = [seed & _WORD, seed >> 32 & _WORD]
    multipliers = [np.uint64(multiplier) for multiplier in PHILOX_MULTIPLIERS]
    # Two of each, in turn: the low words of the last round are read while those of the next are written.
    buffers = [[np.empty(size, np.uint64) for _ in multipliers] for _ in range(2)]
    for number in range(10):
        products = buffers[number % 2]
        np.multiply(c0, multipliers[0], out=products[0])
        np.multiply(c2, multipliers[1], out=products[1])
        (low0, high0), (low1, high1) = (product.view("<u4").reshape(size, 2).T for product in products)
        np.bitwise_xor(high1, c1, out=c0)
        np.bitwise_xor(high0, c3, out=c2)
        c0 ^= np.uint32(keys[0])
        c2 ^= np.uint32(keys[1])
        c1, c3 = low1, low0
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, PHILOX_WEYL, strict=True)]
    return np.stack((c0, c1, c2, c3), axis=1)
