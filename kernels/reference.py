"""Plain torch: the definition of right for every operation. Other implementations are tested against this file."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cache import LARGEST_QUANTIZED, AttentionBatch, LayerKV

Expert = Callable[[Tensor], Tensor]
"""`[num_tokens, hidden_size]` to the same, row by row."""

TURNED_BLOCK = 64
"""Features are turned in blocks of so many before they are quantised."""
# 8 and 4 are left out: in vectors of 16 they cost the most, and all of 64 features together are hardly better.
_TURNED_DISTANCES = (32, 16, 2, 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` over the last dimension, in `x.dtype`; the mean square is taken in float32.

    The normalised value is rounded to `x.dtype` before the weight is applied, as Llama does.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`; `x` and `residual` are `[num_tokens, hidden_size]`."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rms_norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / rms(x) * weight` over the last dimension, all of it in float32 and rounded to `x.dtype` at the end.

    So do Gemma, whose weight is `1 + w` in float32, and gpt-oss; `weight` is of any dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm_float32(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm_float32(x + residual), x + residual)`, both `[num_tokens, hidden_size]` in `x.dtype`."""
    residual = x + residual
    return rms_norm_float32(residual, weight, eps), residual


def rotary_embedding(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key by their position, in the neox layout (first half against second half).

    query `[num_tokens, num_heads, head_dim]`, key `[num_tokens, num_kv_heads, head_dim]`;
    cos and sin `[num_tokens, rotary_dim / 2]` float32. The first `rotary_dim` dimensions of each head are turned, in
    float32; the rest pass as they are.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    first, second = first.float(), second.float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def turn_blocks(x: Tensor) -> Tensor:
    """Multiply x, `[rows, size]`, by Hadamard matrices of ones and minus ones, in float32, sixteen features by one.

    The sixteen are those of a block of 64 whose indices differ in four bits. What is missing of the last block is zero.
    A value that stands out is spread over its sixteen, and takes less of the others when a row is rounded to one scale.
    QuaRot (arXiv 2404.00456) does so with whole rows.
    """
    turned = F.pad(x.float(), (0, -x.shape[-1] % TURNED_BLOCK))
    for distance in _TURNED_DISTANCES:
        first, second = turned.unflatten(-1, (-1, 2, distance)).unbind(-2)
        turned = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return turned


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `turn_blocks(x)` as int8 from -127 to 127 and the float32 scale of each row, which its maximum gives.

    A scale is a normal number, so that its reciprocal is finite: a row of zeros stays one. What is not finite in a row,
    or beyond float32 once it is turned, makes its scale NaN.
    """
    turned = turn_blocks(x)
    largest = turned.abs().amax(dim=-1)
    scales = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (turned * scales.reciprocal().unsqueeze(-1)).round_().clamp_(-127, 127)
    return values.nan_to_num_().to(torch.int8), scales.where(largest.isfinite(), torch.nan)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a linear's weight, `[out_features, in_features]`, as int8 and the float32 scale of each output.

    Its rows are turned as those that it is multiplied with. Both turns together are a factor, that the scales undo.
    """
    values, scales = quantize_rows(weight)
    return values, scales / 2 ** len(_TURNED_DISTANCES)


def int8_linear(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` in `x.dtype`, of x quantised row by row, and summed up in whole numbers.

    x `[num_tokens, in_features]`; weight and weight_scales are what `quantize_weight` made; bias `[out_features]`
    float32.
    """
    values, scales = quantize_rows(x)
    return scaled_products(values.double() @ weight.double().T, scales, weight_scales, bias).to(x.dtype)


def scaled_products(products: Tensor, scales: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return what products of quantised numbers stand for, `[num_tokens, out_features]`, in float32."""
    out = products.float() * scales.unsqueeze(-1) * weight_scales
    return out if bias is None else out + bias


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of `[num_tokens, 2 * intermediate_size]`, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` of `[num_tokens, 2 * intermediate_size]`, gate first; gelu by the error function."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` of `[num_tokens, 2 * intermediate_size]`, gate first; gelu by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return `gate * sigmoid(alpha * gate) * (up + 1)` of `[num_tokens, 2 * intermediate_size]`, gate first (gpt-oss).

    Before that the gate is clamped from above to `limit`, and up from both sides.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def mixture_of_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Sequence[Expert]) -> Tensor:
    """Return for each token the sum of its experts' outputs by their weights, `[num_tokens, hidden_size]` in `x.dtype`.

    expert_ids `[num_tokens, top_k]` int64, each token's distinct experts; weights `[num_tokens, top_k]` float32. Sums
    are float32, in the order of the experts' numbers.
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for token, (chosen, shares) in enumerate(zip(expert_ids.tolist(), weights, strict=True)):
        for index, expert in sorted(enumerate(chosen), key=lambda pair: pair[1]):
            out[token] += shares[index] * experts[expert](x[token : token + 1])[0].float()
    return out.to(x.dtype)


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x, `[num_tokens, num_kv_heads, head_dim]`, in a dtype of `LARGEST_QUANTIZED`, and the scale of each head.

    A scale, `[num_tokens, num_kv_heads]` float32, is a normal number, so that a head of zeros stays one. What is not
    finite in a head makes its scale NaN.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1)
    limit = LARGEST_QUANTIZED[dtype]
    scales = (largest / limit).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (wide / scales.unsqueeze(-1)).nan_to_num_().clamp_(-limit, limit)
    if not dtype.is_floating_point:
        values.round_()
    return values.to(dtype), scales.where(largest.isfinite(), torch.nan)


def add_rms_norm_float8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, in_float32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `add_rms_norm`, or `add_rms_norm_float32`, with the norm in float8_e4m3fn and a scale for each token.

    That is `(values, scales, x + residual)`, values `[num_tokens, hidden_size]` and scales `[num_tokens]` float32, as
    `quantize_heads` makes them.
    """
    normed, residual = (add_rms_norm_float32 if in_float32 else add_rms_norm)(x, residual, weight, eps)
    values, scales = quantize_heads(normed.unsqueeze(1), torch.float8_e4m3fn)
    return values.squeeze(1), scales.squeeze(1), residual


def dequantize_heads(stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what a cache holds, `[..., head_dim]`, in `dtype`; scales `[...]`, or None where it needs none."""
    return stored.to(dtype) if scales is None else (stored.float() * scales.unsqueeze(-1)).to(dtype)


def write_kv(key: Tensor, value: Tensor, layer: LayerKV, slot_mapping: Tensor) -> None:
    """Store each token's key and value, `[num_tokens, num_kv_heads, head_dim]`, at its slot; slot -1 stores nothing.

    They become numbers of the cache's dtype: quantised, each token's head by itself, where that has scales.
    """
    num_kv_heads, block_size, head_dim = layer.key.shape[1:]
    slots = slot_mapping.clamp(min=0).unsqueeze(1)
    heads = torch.arange(num_kv_heads, device=slots.device)
    rows = ((slots // block_size * num_kv_heads + heads) * block_size + slots % block_size).flatten()
    # What stores nothing writes zeros over the null block's zeros, so that no device is asked which tokens these are.
    skipped = slot_mapping < 0
    for cache, scales, new in ((layer.key, layer.key_scales, key), (layer.value, layer.value_scales, value)):
        if scales is None:
            stored = new.to(cache.dtype)
        else:
            stored, new_scales = quantize_heads(new, cache.dtype)
            scales.view(-1).index_copy_(0, rows, new_scales.masked_fill(skipped[:, None], 0).flatten())
            # Of the 8-bit numbers, few operations serve any but the integers.
            cache, stored = cache.view(torch.int8), stored.view(torch.int8)
        cache.view(-1, head_dim).index_copy_(0, rows, stored.masked_fill(skipped[:, None, None], 0).flatten(0, 1))


class QueryKeyNorms(NamedTuple):
    """The norms of a layer's queries and keys, each as long as what it spans: `[head_dim]`, or all heads together.

    None where there is no norm. `in_float32` is which of `rms_norm` and `rms_norm_float32` they are.
    """

    query: Tensor | None
    key: Tensor | None
    eps: float
    in_float32: bool

    def normalise(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise each span as long as `weight` of `[num_tokens, size]`."""
        if weight is None:
            return x
        norm = rms_norm_float32 if self.in_float32 else rms_norm
        return norm(x.unflatten(1, (-1, len(weight))), weight, self.eps).flatten(1)


def split_qkv(
    qkv: Tensor, norms: QueryKeyNorms, rotation: tuple[Tensor, Tensor] | None, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a fused projection's queries, keys and values, each `[num_tokens, heads, head_dim]`; see `write_qkv`."""
    kv_size = num_kv_heads * head_dim
    query, key, value = qkv.split((qkv.shape[1] - 2 * kv_size, kv_size, kv_size), dim=1)
    query, key = norms.normalise(query, norms.query), norms.normalise(key, norms.key)
    query, key, value = (x.unflatten(1, (-1, head_dim)) for x in (query, key, value))
    if rotation is not None:
        query, key = rotary_embedding(query, key, *rotation)
    return query, key, value


def write_qkv(
    qkv: Tensor, norms: QueryKeyNorms, rotation: tuple[Tensor, Tensor] | None, layer: LayerKV, slot_mapping: Tensor
) -> Tensor:
    """Store the keys and values of a fused projection at their slots, and return its queries for attention.

    qkv `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: queries, keys, values. Queries, returned as
    `[num_tokens, num_heads, head_dim]`, and keys are normed and then turned by `rotation`, cosine and sine of
    `rotary_embedding`; None turns nothing.
    """
    query, key, value = split_qkv(qkv, norms, rotation, layer.key.shape[1], layer.key.shape[3])
    write_kv(key, value, layer, slot_mapping)
    return query


def paged_attention(
    query: Tensor,
    layer: LayerKV,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a flat mixed batch over its blocks: `[num_tokens, num_heads, head_dim]`, as the query.

    A sequence's query rows are the last `query_len` positions of its `context_len`; keys and values of this step must
    be in the cache already. Query head `h` reads KV head `h // (num_heads / num_kv_heads)`. Scores, softmax and sums
    are float32.

    The query at position `i` sees the keys `i - window < j <= i`, all `j <= i` without a window. A scaled score `s`
    becomes `softcap * tanh(s / softcap)`. `sinks` `[num_heads]` is a further logit of each head's softmax (gpt-oss)
    that takes weight and has no value.
    """
    num_kv_heads, block_size, head_dim = layer.key.shape[1:]
    outputs = []
    start = 0
    for row, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        blocks = batch.block_tables[row, : -(-context_len // block_size)]
        key, value = (
            dequantize_heads(cache[blocks], None if scales is None else scales[blocks], torch.float32)
            .transpose(0, 1)
            .reshape(num_kv_heads, -1, head_dim)[:, :context_len]
            for cache, scales in ((layer.key, layer.key_scales), (layer.value, layer.value_scales))
        )
        rows = query[start : start + query_len].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,hkd->hgqk", rows, key) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = _hidden(query_len, context_len, window, query.device)
        weights = _softmax(scores.masked_fill(hidden, float("-inf")), sinks)
        outputs.append(torch.einsum("hgqk,hkd->qhgd", weights, value).flatten(1, 2))
        start += query_len
    return torch.cat(outputs).to(query.dtype)


def _hidden(query_len: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[query_len, context_len]` bool, true where a query may not look."""
    key = torch.arange(context_len, device=device)
    position = key[context_len - query_len :, None]
    future = key > position
    return future if window is None else future | (key <= position - window)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys, `[num_kv_heads, group, query_len, context_len]`; sinks may take some."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], -1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def lora_add(x: Tensor, y: Tensor, rows: Tensor, a: Tensor, b: Tensor, columns: slice) -> None:
    """Add `x @ a.T @ b.T` to `columns` of `y`, in place, for some rows of both (int64, each at most once).

    x `[num_tokens, in_features]`, y `[num_tokens, out_features]`, a `[rank, in_features]`, b `[columns, rank]`. The
    products are float32.
    """
    product = x[rows].float() @ a.float().T @ b.float().T
    y[rows, columns] += product.to(y.dtype)


PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox_4x32_10(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four random 32-bit words of Philox-4x32-10 for each counter and key.

    All tensors are int64 holding unsigned 32-bit words, and broadcast together. Algorithm: Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The products wrap around int64; their 64 bits are right, and masking after the shift drops the sign's copies.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & _WORD, product1 & _WORD
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0 & _WORD
        k0, k1 = (k0 + PHILOX_WEYL[0]) & _WORD, (k1 + PHILOX_WEYL[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise `[num_rows, vocab_size]` float32, a function of seed, position and id alone.

    seeds and positions are `[num_rows]` int64. Word `id % 4` of Philox with the seed as key and the counter
    `(id // 4, position low, position high, 0)` gives the noise, see `gumbel_of_words`.
    """
    counters = torch.arange(-(-vocab_size // 4), device=seeds.device).unsqueeze(0)
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    counter = (counters, positions & _WORD, (positions >> 32) & _WORD, torch.zeros_like(counters))
    words = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    word = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :vocab_size]
    return gumbel_of_words(word)


def gumbel_of_words(words: Tensor) -> Tensor:
    """Return the noise, float32, of random 32-bit words (int64): `-log(-log(1 - u))` of the word's `u` in (0, 1)."""
    # Small u is where an argmax looks, and there float32 keeps all 32 bits; only the top rounds to 1 and is clamped.
    u = ((words.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of `[num_rows, vocab_size]`, float32, and its place, int64, of equals the first.

    Of a row with a NaN or +inf the value is one of both, and the place may be any.
    """
    values, places = logits.float().max(dim=-1)
    return values, places


def gumbel_argmax(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for each row, in proportion to `exp(logits / temperature)`: `[num_rows]` int64.

    It is the argmax of noise plus scores, which are the logits less their largest, over the temperature, in float32.
    logits `[num_rows, vocab_size]`, -inf for what must not be drawn; of a row whose largest is not finite, any token
    may be returned. temperatures `[num_rows]` float32, normal numbers. Seeds and positions: see `gumbel_noise`.
    """
    wide = logits.float()
    scores = (wide - wide.amax(dim=-1, keepdim=True)) / temperatures.unsqueeze(1)
    return (scores + gumbel_noise(seeds, positions, scores.shape[-1])).argmax(dim=-1)
