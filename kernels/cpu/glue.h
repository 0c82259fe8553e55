// What stands between the products of a layer: norms, rotations, activations. Each token's row is worked on by one
// thread, in float32, and rounded to bfloat16 where `kernels.reference` rounds it.
#pragma once

#include <cmath>

#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

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
inline Floats rounded(Floats x) {
  bf16 narrow[16];
  store_narrow(narrow, x);
  return widen(narrow);
}

inline void norm_row(const NormCall& call, const bf16* x, bf16* out) {
  const ptrdiff_t size = call.size;
  Floats squares = zeros();
  for (ptrdiff_t i = 0; i < size; i += 16) {
    Floats wide = widen_some(x + i, size - i);
    squares = fma(wide, wide, squares);
  }
  const Floats scale = fill(1 / std::sqrt(sum_of(squares) / float(size) + call.eps));
  for (ptrdiff_t i = 0; i < size; i += 16) {
    const Floats weight =
        call.wide_weight ? load_some(call.wide_weight + i, size - i) : widen_some(call.weight + i, size - i);
    Floats y = mul(widen_some(x + i, size - i), scale);
    // Llama rounds the normalised value before the weight is applied, Gemma after.
    store_some(out + i, mul(call.rounds_first ? rounded(y) : y, weight), size - i);
  }
}

void rms_norm(const NormCall& call) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < call.rows; ++row) {
    const bf16* x = call.x + row * call.x_stride;
    if (call.residual) {
      bf16* sum = call.sum + row * call.size;
      const bf16* residual = call.residual + row * call.size;
      for (ptrdiff_t i = 0; i < call.size; i += 16)
        store_some(sum + i, add(widen_some(x + i, call.size - i), widen_some(residual + i, call.size - i)),
                   call.size - i);
      x = sum;
    }
    norm_row(call, x, call.out + row * call.size);
  }
}

// The first half of the turned dimensions against the second.
inline void rotate_head(const bf16* x, const float* cos, const float* sin, int half, int head_dim, bf16* out) {
  for (int i = 0; i < half; i += 16) {
    const ptrdiff_t left = half - i;
    const Floats c = load_some(cos + i, left), s = load_some(sin + i, left);
    const Floats first = widen_some(x + i, left), second = widen_some(x + half + i, left);
    store_some(out + i, sub(mul(first, c), mul(second, s)), left);
    store_some(out + half + i, add(mul(second, c), mul(first, s)), left);
  }
  std::memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(bf16));
}

void rotary_embedding(const RotaryCall& call) {
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const float *cos = call.cos + token * call.half, *sin = call.sin + token * call.half;
    for (int head = 0; head < call.num_heads; ++head)
      rotate_head(call.x + token * call.x_stride + head * call.head_dim, cos, sin, call.half, call.head_dim,
                  call.out + (token * call.num_heads + head) * call.head_dim);
  }
}

// Clamped to where the power of two is a normal number in both instruction sets.
inline Floats sigmoid(Floats x) {
  const Floats clamped = min(fill(87), max(fill(-87), x));
  return div(fill(1), add(fill(1), exp2(mul(clamped, fill(-1.4426950408889634f)))));
}

void silu_and_mul(const GateCall& call) {
#pragma omp parallel for schedule(static)
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    const bf16 *gate = call.gate_up + token * 2 * call.size, *up = gate + call.size;
    bf16* out = call.out + token * call.size;
    for (ptrdiff_t i = 0; i < call.size; i += 16) {
      const ptrdiff_t left = call.size - i;
      const Floats g = widen_some(gate + i, left);
      store_some(out + i, mul(rounded(mul(g, sigmoid(g))), widen_some(up + i, left)), left);
    }
  }
}

}  // namespace PAGEMILL_ISA
