"""How fast the kernels are beside what the card can do: a copy of its memory, and a product of large matrices.

Shapes are those of Llama 3.1 8B and Qwen3 0.6B. What is counted is what must be moved or computed, once: keys and
values of all contexts, the weight as it is stored, logits as often as the operation needs them at least.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference_quantized
from kernels.cache import KVCache, allocate_kv_cache
from kernels.experts import StackedExperts
from kernels.reference import QueryKeyNorms
from kernels.reference_sampling import Limits, Penalties
from kernels.triton import activations, attention, experts, floors, fp8, kv, logprobs, norms, penalties, sampling, w4a16
from tests.gpu.cases import Case, Found, Setting
from tests.gpu.numbers import wants_float8
from tests.gpu.timing import copy_rate, gemm_rate, seconds_of
from tests.kernels.batches import Chunk
from tests.kernels.triton.attention_cases import batch_of, chunks_of, family

_BLOCK_SIZE = 32
_CUDA = torch.device("cuda")
_BFLOAT16, _FLOAT8 = torch.bfloat16, torch.float8_e4m3fn


class Heads(NamedTuple):
    """Those of queries, those of keys and values, and their size."""

    query: int
    kv: int
    size: int


LLAMA = Heads(32, 8, 128)
QWEN = Heads(16, 8, 128)
_VOCABULARY, _ROWS = 151_936, 256
# Of Qwen3 30B-A3B: experts, how many of them a token has, and both sizes.
_EXPERTS = (128, 8, 2048, 768)


def cases(setting: Setting) -> list[Case]:
    """What has a bar comes first."""
    found = [Case("machine: copy and product", _ceilings)]
    for make in (_decode, _prefill, _int4, _glue, _sampler, _other_products, _other_attention):
        found.extend(make(setting))
    return found


def _ceilings() -> Found:
    return Found(figures={"GB/s copied": copy_rate() / 1e9, "TFLOP/s of a bf16 product": gemm_rate() / 1e12})


def _moved(num_bytes: float, seconds: float, bar: float | None = None) -> Found:
    rate = num_bytes / seconds
    share = rate / copy_rate()
    figures = {"us": seconds * 1e6, "GB/s": rate / 1e9, "% of copy": 100 * share}
    return Found("", figures, f">= {bar:.0%} of copy" if bar else "", None if bar is None else share >= bar)


def _computed(operations: float, seconds: float, bar: float | None = None) -> Found:
    rate = operations / seconds
    share = rate / gemm_rate()
    figures = {"us": seconds * 1e6, "TFLOP/s": rate / 1e12, "% of product": 100 * share}
    return Found("", figures, f">= {bar:.0%} of product" if bar else "", None if bar is None else share >= bar)


def _filled(chunks: list[Chunk], heads: Heads, dtype: torch.dtype) -> KVCache:
    num_blocks = 1 + max(block for chunk in chunks for block in chunk.blocks)
    cache = allocate_kv_cache(1, num_blocks, _BLOCK_SIZE, heads.kv, heads.size, dtype, _CUDA)
    if cache.scales is None:
        cache.data.normal_()
    else:
        cache.data.view(torch.uint8).random_(0, 0x7F)
        cache.scales.fill_(1e-3)
    return cache


def _attended(chunks: list[Chunk], heads: Heads, dtype: torch.dtype, window: int | None = None) -> float:
    """Seconds of one layer's attention, planned before."""
    cache, rows = _filled(chunks, heads, dtype), sum(chunk.num_tokens for chunk in chunks)
    query = torch.randn(rows, heads.query, heads.size, device=_CUDA, dtype=_BFLOAT16)
    plan = attention.plan_attention(batch_of(chunks, _BLOCK_SIZE, _CUDA), cache, heads.query, window)
    layer = cache.layer(0)
    return seconds_of(lambda: attention.paged_attention(query, layer, plan, heads.size**-0.5))


def _kv_bytes(num_tokens: int, heads: Heads, dtype: torch.dtype) -> int:
    scales = 4 if dtype == _FLOAT8 else 0
    return 2 * num_tokens * heads.kv * (heads.size * dtype.itemsize + scales)


def _decode(setting: Setting) -> Iterator[Case]:
    def measure(rows: int, context: int, heads: Heads, dtype: torch.dtype, bar: float | None) -> Found:
        wants_float8(setting, dtype)
        seconds = _attended(chunks_of([(context, 1)] * rows, _BLOCK_SIZE), heads, dtype)
        return _moved(_kv_bytes(rows * context, heads, dtype), seconds, bar)

    for rows, context, heads, dtype, bar in (
        (256, 1024, LLAMA, _BFLOAT16, 0.8),
        (64, 4096, LLAMA, _BFLOAT16, 0.8),
        (8, 32_768, LLAMA, _BFLOAT16, 0.8),
        (256, 1024, QWEN, _BFLOAT16, 0.8),
        (256, 2048, LLAMA, _FLOAT8, None),
        (1, 8192, LLAMA, _BFLOAT16, None),
    ):
        label = f"decode attention: {rows} rows of {context}, {heads.query}:{heads.kv}, {_short(dtype)}"
        yield Case(label, partial(measure, rows, context, heads, dtype, bar))


def _prefill(setting: Setting) -> Iterator[Case]:
    def measure(shapes: list[tuple[int, int]], heads: Heads, bar: float | None, dtype: torch.dtype) -> Found:
        wants_float8(setting, dtype)
        seconds = _attended(chunks_of(shapes, _BLOCK_SIZE), heads, dtype)
        seen = sum(queries * (2 * context - queries + 1) / 2 for context, queries in shapes)
        return _computed(4 * seen * heads.query * heads.size, seconds, bar)

    for shapes, name, bar, dtype in (
        ([(8192, 8192)], "8192 queries of 8192", 0.5, _BFLOAT16),
        ([(8192, 1024)] * 8, "8 chunks of 1024 at 8192", 0.5, _BFLOAT16),
        ([(8192, 8192)], "8192 queries of 8192", None, _FLOAT8),
        ([(1024, 1024)] * 8, "8 prompts of 1024", None, _BFLOAT16),
    ):
        label = f"prefill attention: {name}, 32:8, {_short(dtype)}"
        yield Case(label, partial(measure, shapes, LLAMA, bar, dtype))


def _other_attention(setting: Setting) -> Iterator[Case]:
    def measure_shared(prefix: int, rows: int) -> Found:
        """Counted as if every row read all of its keys: above 100 % is what sharing saves."""
        chunks = family(prefix, [64] * rows, _BLOCK_SIZE)
        return _moved(_kv_bytes(rows * (prefix + 63), LLAMA, _BFLOAT16), _attended(chunks, LLAMA, _BFLOAT16))

    def measure_mixed() -> Found:
        chunks = chunks_of([(2048, 1)] * 255 + [(2048, 1024)], _BLOCK_SIZE)
        return Found(figures={"us": 1e6 * _attended(chunks, LLAMA, _BFLOAT16)})

    yield Case("decode attention: 256 rows that share 2048 of 2112", partial(measure_shared, 2048, 256))
    yield Case("mixed attention: 255 rows and a chunk of 1024, at 2048", measure_mixed)


def _int4(setting: Setting) -> Iterator[Case]:
    def measure(rows: int, outputs: int, inputs: int, bar: float | None) -> Found:
        numbers = torch.randn(outputs, inputs, device=_CUDA, dtype=_BFLOAT16)
        weight = reference_quantized.quantize_int4(numbers, 128)
        del numbers
        x = torch.randn(rows, inputs, device=_CUDA, dtype=_BFLOAT16)
        seconds = seconds_of(lambda: w4a16.int4_linear(x, weight, None))
        if rows > w4a16.DEQUANTIZE_ABOVE:
            return _computed(2 * rows * outputs * inputs, seconds)
        assert weight.zeros is not None
        return _moved(sum(part.nbytes for part in (weight.values, weight.scales, weight.zeros)), seconds, bar)

    # A card's memory needs tens of megabytes to be busy: smaller weights are times of a launch.
    for outputs, inputs in ((28_672, 4096), (4096, 14_336), (6144, 4096)):
        for rows in (1, 16) if outputs == 6144 else (1, 8, 16, 64, 2048):
            bar = 0.7 if rows <= 16 and outputs != 6144 else None
            yield Case(f"w4a16: {rows}x{inputs} by {outputs}", partial(measure, rows, outputs, inputs, bar))


def _glue(setting: Setting) -> Iterator[Case]:
    def measure_norm(rows: int, size: int) -> Found:
        x, residual = torch.randn(2, rows, size, device=_CUDA, dtype=_BFLOAT16)
        weight = torch.ones(size, device=_CUDA, dtype=_BFLOAT16)
        return _moved(4 * x.nbytes, seconds_of(lambda: norms.add_rms_norm(x, residual, weight, 1e-5)))

    def measure_activation(rows: int, size: int) -> Found:
        x = torch.randn(rows, 2 * size, device=_CUDA, dtype=_BFLOAT16)
        return _moved(1.5 * x.nbytes, seconds_of(lambda: activations.silu_and_mul(x)))

    def measure_write(rows: int, heads: Heads, normed: bool, dtype: torch.dtype) -> Found:
        wants_float8(setting, dtype)
        cache = allocate_kv_cache(1, -(-rows // _BLOCK_SIZE) + 1, _BLOCK_SIZE, heads.kv, heads.size, dtype, _CUDA)
        width = (heads.query + 2 * heads.kv) * heads.size
        qkv = torch.randn(rows, width, device=_CUDA, dtype=_BFLOAT16)
        weight = torch.ones(heads.size, device=_CUDA, dtype=_BFLOAT16) if normed else None
        angles = torch.rand(rows, heads.size // 2, device=_CUDA)
        turn, slots = (angles.cos(), angles.sin()), torch.arange(rows, device=_CUDA) + _BLOCK_SIZE
        query_key, layer = QueryKeyNorms(weight, weight, 1e-6, False), cache.layer(0)
        seconds = seconds_of(lambda: kv.write_qkv(qkv, query_key, turn, layer, slots))
        queries = rows * heads.query * heads.size * qkv.itemsize
        return _moved(qkv.nbytes + queries + _kv_bytes(rows, heads, dtype), seconds)

    yield Case("norms: add_rms_norm 8192x4096", partial(measure_norm, 8192, 4096))
    yield Case("norms: add_rms_norm 256x4096", partial(measure_norm, 256, 4096))
    yield Case("activations: silu_and_mul 8192x14336", partial(measure_activation, 8192, 14_336))
    yield Case("kv: write_qkv 8192 rows, 32:8", partial(measure_write, 8192, LLAMA, False, _BFLOAT16))
    yield Case("kv: write_qkv 8192 rows, 16:8, normed", partial(measure_write, 8192, QWEN, True, _BFLOAT16))
    yield Case("kv: write_qkv 8192 rows, 32:8, float8", partial(measure_write, 8192, LLAMA, False, _FLOAT8))


def _sampler(setting: Setting) -> Iterator[Case]:
    rows = _ROWS

    def logits() -> Tensor:
        return torch.randn(rows, _VOCABULARY, device=_CUDA) * 3

    def measure_largest() -> Found:
        scores = logits()
        return _moved(scores.nbytes, seconds_of(lambda: sampling.largest(scores)))

    def measure_draw() -> Found:
        scores, heat = logits(), torch.full((rows,), 0.6, device=_CUDA)
        seeds, positions = torch.arange(rows, device=_CUDA), torch.arange(rows, device=_CUDA)
        return _moved(2 * scores.nbytes, seconds_of(lambda: sampling.gumbel_argmax(scores, heat, seeds, positions)))

    def measure_floors() -> Found:
        scores, heat = logits(), torch.full((rows,), 0.6, device=_CUDA)
        top_k = torch.full((rows,), 50, device=_CUDA)
        limits = Limits(top_k, torch.full((rows,), 0.9, device=_CUDA), torch.zeros(rows, device=_CUDA))
        return _moved(scores.nbytes, seconds_of(lambda: floors.score_floors(scores, heat, limits)))

    def measure_logprobs() -> Found:
        scores = logits()
        token_ids = torch.zeros(rows, dtype=torch.int64, device=_CUDA)
        return _moved(scores.nbytes, seconds_of(lambda: logprobs.token_logprobs(scores, token_ids, 20)))

    def measure_penalties() -> Found:
        scores, counts = logits(), torch.zeros(rows, _VOCABULARY, dtype=torch.int32, device=_CUDA)
        order, factor = torch.arange(rows, device=_CUDA), torch.ones(rows, device=_CUDA)
        asked = Penalties(order, order, factor, factor, factor)
        moved = 2 * scores.nbytes + counts.nbytes
        return _moved(moved, seconds_of(lambda: penalties.apply_penalties(scores, counts, asked)))

    named = {
        "largest": measure_largest,
        "gumbel_argmax": measure_draw,
        "score_floors, top-k 50 and top-p 0.9": measure_floors,
        "token_logprobs, 20 likeliest": measure_logprobs,
        "apply_penalties": measure_penalties,
    }
    for name, measure in named.items():
        yield Case(f"sampler: {name}, {rows}x{_VOCABULARY}", measure)


def _other_products(setting: Setting) -> Iterator[Case]:
    def measure_float8(rows: int, outputs: int, inputs: int) -> Found:
        wants_float8(setting)
        weight = reference_quantized.quantize_float8_weight(torch.randn(outputs, inputs, device=_CUDA))
        x = torch.randn(rows, inputs, device=_CUDA, dtype=_BFLOAT16)
        seconds = seconds_of(lambda: fp8.float8_linear(x, weight, None))
        if rows <= 16:
            return _moved(weight.values.nbytes + weight.scales.nbytes, seconds)
        return _computed(2 * rows * outputs * inputs, seconds)

    def measure_experts(rows: int) -> Found:
        num_experts, top_k, hidden, intermediate = _EXPERTS
        gate_up = torch.randn(num_experts, 2 * intermediate, hidden, device=_CUDA, dtype=_BFLOAT16)
        down = torch.randn(num_experts, hidden, intermediate, device=_CUDA, dtype=_BFLOAT16)
        stacked = StackedExperts(gate_up, None, down, None, activations.silu_and_mul)
        x = torch.randn(rows, hidden, device=_CUDA, dtype=_BFLOAT16)
        weights, expert_ids = torch.randn(rows, num_experts, device=_CUDA).softmax(-1).topk(top_k)
        seconds = seconds_of(lambda: experts.mixture_of_experts(x, expert_ids, weights, stacked))
        used = len(expert_ids.unique())
        if rows <= 64:
            return _moved((gate_up.nbytes + down.nbytes) * used / num_experts, seconds)
        return _computed(6 * rows * top_k * hidden * intermediate, seconds)

    for rows in (1, 16, 2048):
        yield Case(f"fp8: {rows}x4096 by 28672", partial(measure_float8, rows, 28_672, 4096))
    for rows in (16, 4096):
        yield Case(f"experts: {rows} rows, 8 of 128, 2048 and 768", partial(measure_experts, rows))


def _short(dtype: torch.dtype) -> str:
    return {_BFLOAT16: "bf16", _FLOAT8: "fp8"}[dtype]
