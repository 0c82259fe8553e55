"""Log-probabilities of chosen tokens, their ranks, and the likeliest tokens: of chunks of a row, and then of the row.

No row of log-probabilities is stored: each kernel makes those of its chunk from the chunks' maxima and sums. Those of
a row are added up in an order that does not depend on its batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_sampling import Likeliest, LogprobTensors
from kernels.triton.launch import Specialisation, launch_for

_LOWEST = tl.constexpr(-(1 << 63))
_ID_BITS = 0x7FFFFFFF


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """As `kernels.reference_sampling.token_logprobs`; each row of `logits` is contiguous."""
    num_rows, vocab_size = logits.shape
    maxima, sums = _softmax_by_chunk(logits)
    launch = launch_for("rank", logits.device)
    num_chunks = triton.cdiv(vocab_size, launch.meta["CHUNK"])
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    likelier = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    if num_rows:
        rank_kernel[(num_rows, num_chunks)](
            logits,
            maxima,
            sums,
            token_ids,
            chosen,
            likelier,
            logits.stride(0),
            vocab_size,
            maxima.shape[1],
            SUMS=triton.next_power_of_2(maxima.shape[1]),
            **launch.options,
        )
    return LogprobTensors(chosen, likelier.sum(dim=-1) + 1, *_likeliest(logits, num_top, maxima, sums))


def likeliest(scores: Tensor, count: int) -> Likeliest:
    """As `kernels.reference_sampling.likeliest`; each row of `scores` is contiguous."""
    return _likeliest(scores, count, None, None)


def _likeliest(scores: Tensor, count: int, maxima: Tensor | None, sums: Tensor | None) -> Likeliest:
    """`maxima` and `sums` are those of `_softmax_by_chunk`, if what is asked for is log-probabilities."""
    num_rows, vocab_size = scores.shape
    count = min(count, vocab_size)
    launch = launch_for("likeliest", scores.device)
    num_chunks = triton.cdiv(vocab_size, launch.meta["CHUNK"])
    keys = torch.empty(num_rows, num_chunks * count, dtype=torch.int64, device=scores.device)
    num_sums = 1 if maxima is None else maxima.shape[1]
    if keys.numel():
        likeliest_kernel[(num_rows, num_chunks)](
            scores,
            maxima,
            sums,
            keys,
            scores.stride(0),
            vocab_size,
            num_sums,
            count,
            SUMS=triton.next_power_of_2(num_sums),
            **launch.options,
        )
    # No two keys are equal, so that it does not matter which of equals topk would take.
    best = keys.topk(count, dim=-1).values
    ordered = (best >> 32).int()
    values = (ordered ^ (ordered >> 31 & 0x7FFFFFFF)).view(torch.float32)
    return Likeliest(values, _ID_BITS - (best & _ID_BITS))


def _softmax_by_chunk(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each chunk, and the sum of exponentials less that: `[R, num_chunks]` float32 each."""
    num_rows, vocab_size = logits.shape
    launch = launch_for("softmax_sums", logits.device)
    num_chunks = triton.cdiv(vocab_size, launch.meta["CHUNK"])
    maxima, sums = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    if num_rows:
        grid = (num_rows, num_chunks)
        softmax_sums_kernel[grid](logits, maxima, sums, logits.stride(0), vocab_size, **launch.options)
    return maxima, sums


@triton.jit
def softmax_sums_kernel(logits_ptr, maxima_ptr, sums_ptr, logits_stride, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, axis=0)
    partial = row * tl.num_programs(1) + chunk
    tl.store(maxima_ptr + partial, maximum)
    # Of a chunk that is ruled out as a whole nothing is added.
    tl.store(sums_ptr + partial, tl.sum(tl.exp(x - tl.where(maximum > float("-inf"), maximum, 0.0)), axis=0))


@triton.jit
def _normaliser(maxima_ptr, sums_ptr, row, num_sums, SUMS: tl.constexpr):
    """Return what is subtracted from a row's logits, in this order, for their log-probabilities."""
    chunk = tl.arange(0, SUMS)
    maxima = tl.load(maxima_ptr + row * num_sums + chunk, mask=chunk < num_sums, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_sums + chunk, mask=chunk < num_sums, other=0.0)
    maximum = tl.max(maxima, axis=0)
    return maximum, tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))


@triton.jit
def rank_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    token_ids_ptr,
    logprobs_ptr,
    likelier_ptr,
    logits_stride,
    vocab_size,
    num_sums,
    CHUNK: tl.constexpr,
    SUMS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    maximum, log_sum = _normaliser(maxima_ptr, sums_ptr, row, num_sums, SUMS)
    row_ptr = logits_ptr + row * logits_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32) - maximum - log_sum
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    likelier = x - maximum - log_sum > chosen
    tl.store(likelier_ptr + row * tl.num_programs(1) + chunk, tl.sum(likelier.to(tl.int32), axis=0))
    tl.store(logprobs_ptr + row, chosen, mask=chunk == 0)


@triton.jit(do_not_specialize=["count"])
def likeliest_kernel(
    scores_ptr,
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    scores_stride,
    vocab_size,
    num_sums,
    count,
    CHUNK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Store the `count` largest keys of a chunk: a score above, and below it what falls as the id rises."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores_ptr + row * scores_stride + token, mask=token < vocab_size, other=0.0).to(tl.float32)
    if maxima_ptr is not None:
        maximum, log_sum = _normaliser(maxima_ptr, sums_ptr, row, num_sums, SUMS)
        score = score - maximum - log_sum
    # Zero has two signs, which as bits are far apart.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(token < vocab_size, key, _LOWEST)
    keys_ptr += (row * tl.num_programs(1) + chunk) * count
    for place in range(count):
        best = tl.max(key, axis=0)
        tl.store(keys_ptr + place, best)
        key = tl.where(key == best, _LOWEST, key)


SPECIALISATIONS: tuple[Specialisation, ...] = (
    *(
        Specialisation(
            softmax_sums_kernel,
            "softmax_sums",
            {
                "logits_ptr": f"*{dtype}:16",
                "maxima_ptr": "*fp32:16",
                "sums_ptr": "*fp32:16",
                "logits_stride": "i32:16",
                "vocab_size": "i32:16",
            },
            hot=True,
            variant=dtype,
        )
        for dtype in ("fp32", "bf16")
    ),
    *(
        Specialisation(
            rank_kernel,
            "rank",
            {
                "logits_ptr": f"*{dtype}:16",
                "maxima_ptr": "*fp32:16",
                "sums_ptr": "*fp32:16",
                "token_ids_ptr": "*i64:16",
                "logprobs_ptr": "*fp32:16",
                "likelier_ptr": "*i32:16",
                "logits_stride": "i32:16",
                "vocab_size": "i32:16",
                "num_sums": "i32",
                "SUMS": 32,
            },
            hot=True,
            variant=dtype,
        )
        for dtype in ("fp32", "bf16")
    ),
    *(
        Specialisation(
            likeliest_kernel,
            "likeliest",
            {
                "scores_ptr": f"*{dtype}:16",
                "maxima_ptr": "*fp32:16" if normalised else None,
                "sums_ptr": "*fp32:16" if normalised else None,
                "keys_ptr": "*i64:16",
                "scores_stride": "i32:16",
                "vocab_size": "i32:16",
                "num_sums": "i32",
                "count": "i32",
                "SUMS": 32 if normalised else 1,
            },
            hot=True,
            variant=dtype + (" logprobs" if normalised else ""),
        )
        for dtype, normalised in (("fp32", True), ("bf16", True), ("fp32", False))
    ),
)
