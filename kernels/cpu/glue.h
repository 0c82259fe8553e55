// What stands between the products of a layer: norms, rotations, activations. Each token's row is worked on by one
// thread, in float32, and rounded to bfloat16 where `kernels.reference` rounds it.
#pragma once

#include <cmath>
#include <memory>

#include "kv_blocks.h"
#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

// Fewer numbers than this are worked on sooner by one thread than handed to several.
constexpr int64_t kOneThread = 8192;

// Sixteen of a row that may end before: what is missing is zero, and not stored.
inline Floats widen_some(const bf16* p, ptrdiff_t left) {
  if (left >= 16) return widen(p);
  bf16 padded[16] = {};
  std::memcpy(padded, p, left * sizeof(bf16));
  return widen(padded);
}
inline Floats load_some(const float* p, ptrdiff_t left) {
  if (left >= 16) return load(p);
  float padded[16] = {};
  std::memcpy(padded, p, left * sizeof(float));
  return load(padded);
}
inline void store_some(bf16* p, Floats x, ptrdiff_t left) {
  if (left >= 16) return store_narrow(p, x);
  bf16 padded[16];
  store_narrow(padded, x);
  std::memcpy(p, padded, left * sizeof(bf16));
}

// Calls `work(i, left)` for every sixteenth i below `size`; inlined twice, so that whole sixteens ask nothing.
template <class Work>
inline __attribute__((always_inline)) void by_sixteens(ptrdiff_t size, Work work) {
  ptrdiff_t i = 0;
  for (; i + 16 <= size; i += 16) work(i, 16);
  if (i < size) work(i, size - i);
}

// The mean square of a row, or of its sum with `residual`, which goes to `sum`. In four parts that take turns, since an
// addition has to wait for the one before to the same part.
inline float mean_square(const bf16* x, const bf16* residual, bf16* sum, ptrdiff_t size) {
  Floats parts[4] = {zeros(), zeros(), zeros(), zeros()};
  by_sixteens(size, [&](ptrdiff_t i, ptrdiff_t left) __attribute__((always_inline)) {
    Floats wide = widen_some(x + i, left);
    if (residual) {
      wide = rounded(add(wide, widen_some(residual + i, left)));
      store_some(sum + i, wide, left);
    }
    const Floats part = fma(wide, wide, parts[0]);
    parts[0] = parts[1], parts[1] = parts[2], parts[2] = parts[3], parts[3] = part;
  });
  return sum_of(add(add(parts[0], parts[1]), add(parts[2], parts[3]))) / float(size);
}

template <bool rounds_first>
inline void scale_row(const NormCall& call, const bf16* x, float factor, bf16* out) {
  const Floats scale = fill(factor);
  by_sixteens(call.size, [&](ptrdiff_t i, ptrdiff_t left) __attribute__((always_inline)) {
    const Floats weight = call.wide_weight ? load_some(call.wide_weight + i, left) : widen_some(call.weight + i, left);
    const Floats y = mul(widen_some(x + i, left), scale);
    store_some(out + i, mul(rounds_first ? rounded(y) : y, weight), left);
  });
}

// Llama rounds the normalised value before the weight is applied, Gemma after.
inline void norm_row(const NormCall& call, const bf16* x, const bf16* residual, bf16* sum, bf16* out) {
  const float factor = 1 / std::sqrt(mean_square(x, residual, sum, call.size) + call.eps);
  const bf16* row = residual ? sum : x;
  call.rounds_first ? scale_row<true>(call, row, factor, out) : scale_row<false>(call, row, factor, out);
}

void rms_norm(const NormCall& call) {
#pragma omp parallel for schedule(static) if (call.rows * call.size > kOneThread)
  for (int64_t row = 0; row < call.rows; ++row) {
    const ptrdiff_t start = row * call.size;
    const bf16* x = call.x + row * call.x_stride;
    if (call.residual)
      norm_row(call, x, call.residual + start, call.sum + start, call.out + start);
    else
      norm_row(call, x, nullptr, nullptr, call.out + start);
  }
}

// The first half of the turned dimensions against the second.
inline void rotate_head(const bf16* x, const float* cos, const float* sin, int half, int head_dim, bf16* out) {
  by_sixteens(half, [&](ptrdiff_t i, ptrdiff_t left) __attribute__((always_inline)) {
    const Floats c = load_some(cos + i, left), s = load_some(sin + i, left);
    const Floats first = widen_some(x + i, left), second = widen_some(x + half + i, left);
    store_some(out + i, sub(mul(first, c), mul(second, s)), left);
    store_some(out + half + i, add(mul(second, c), mul(first, s)), left);
  });
  std::memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(bf16));
}

void rotary_embedding(const RotaryCall& call) {
#pragma omp parallel for schedule(static) if (call.num_tokens * call.num_heads * call.head_dim > kOneThread)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const float *cos = call.cos + token * call.half, *sin = call.sin + token * call.half;
    for (int head = 0; head < call.num_heads; ++head)
      rotate_head(call.x + token * call.x_stride + head * call.head_dim, cos, sin, call.half, call.head_dim,
                  call.out + (token * call.num_heads + head) * call.head_dim);
  }
}

// One token's heads, `size` numbers together, normed and turned; `normed` is room for as many.
inline void turn_heads(const QkvCall& call, int64_t token, const NormCall& norm, const bf16* x, ptrdiff_t size,
                       bf16* normed, bf16* out) {
  if (norm.size) {
    for (ptrdiff_t span = 0; span < size; span += norm.size)
      norm_row(norm, x + span, nullptr, nullptr, normed + span);
    x = normed;
  }
  if (!call.cos) {
    std::memcpy(out, x, size * sizeof(bf16));
    return;
  }
  const int head_dim = call.write.head_dim;
  const float *cos = call.cos + token * call.half, *sin = call.sin + token * call.half;
  for (ptrdiff_t head = 0; head < size; head += head_dim)
    rotate_head(x + head, cos, sin, call.half, head_dim, out + head);
}

void write_qkv(const QkvCall& call) {
  const ptrdiff_t query_size = ptrdiff_t(call.num_heads) * call.write.head_dim;
  const ptrdiff_t key_size = ptrdiff_t(call.write.num_kv_heads) * call.write.head_dim;
#pragma omp parallel if (call.write.num_tokens * query_size > kOneThread)
  {
    const std::unique_ptr<bf16[]> normed(new bf16[query_size + key_size]), key(new bf16[key_size]);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < call.write.num_tokens; ++token) {
      const bf16* x = call.qkv + token * call.stride;
      prefetch_token(call.write, token);
      turn_heads(call, token, call.query_norm, x, query_size, normed.get(), call.query + token * query_size);
      turn_heads(call, token, call.key_norm, x + query_size, key_size, normed.get(), key.get());
      write_token(call.write, token, key.get());
    }
  }
}

// x / (1 + e^-y); -y is kept to where e^-y is finite in both instruction sets.
inline Floats times_sigmoid(Floats x, Floats y) {
  const Floats power = exp2(min(fill(126), mul(y, fill(-1.4426950408889634f))));
  return div(x, add(fill(1), power));
}

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
inline Floats gelu_tanh(Floats x) {
  const Floats cubic = fma(mul(mul(x, x), x), fill(0.044715f), x);
  return times_sigmoid(x, mul(cubic, fill(2 * 0.7978845608028654f)));
}

// x / 2 * erfc(-x / sqrt(2)), by formula 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.
inline Floats gelu(Floats x) {
  const Floats z = mul(max(x, sub(zeros(), x)), fill(0.7071067811865476f));
  const Floats t = div(fill(1), fma(z, fill(0.3275911f), fill(1)));
  Floats y = fill(1.061405429f);
  y = fma(y, t, fill(-1.453152027f));
  y = fma(y, t, fill(1.421413741f));
  y = fma(y, t, fill(-0.284496736f));
  y = fma(y, t, fill(0.254829592f));
  // erfc(z) = y * t * e^-z^2, and erfc(-z) = 2 - erfc(z).
  const Floats below = mul(mul(y, t), exp2(mul(mul(z, z), fill(-1.4426950408889634f))));
  const Floats negative = mul(mul(min(x, zeros()), fill(0.5f)), below);
  const Floats positive = mul(mul(max(x, zeros()), fill(0.5f)), sub(fill(2), below));
  return add(negative, positive);
}

template <Floats (*activate)(Floats)>
inline Floats weighed(Floats gate, Floats up) {
  return mul(rounded(activate(gate)), up);
}

template <Floats (*activate)(Floats)>
inline void gate_rows(const GateCall& call) {
#pragma omp parallel for schedule(static) if (call.num_tokens * call.size > kOneThread)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const bf16 *gate = call.gate_up + token * 2 * call.size, *up = gate + call.size;
    bf16* out = call.out + token * call.size;
    by_sixteens(call.size, [&](ptrdiff_t i, ptrdiff_t left) __attribute__((always_inline)) {
      store_some(out + i, weighed<activate>(widen_some(gate + i, left), widen_some(up + i, left)), left);
    });
  }
}

void activate_and_mul(const GateCall& call) {
  switch (call.activation) {
    case Activation::silu: return gate_rows<silu>(call);
    case Activation::gelu: return gate_rows<gelu>(call);
    case Activation::gelu_tanh: return gate_rows<gelu_tanh>(call);
  }
}

}  // namespace PAGEMILL_ISA
