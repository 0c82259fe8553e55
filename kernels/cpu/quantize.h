// Rows of numbers as integers, each row with a scale: what one of its integers stands for.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace PAGEMILL_ISA {

// The bits of the largest of `size` numbers, a multiple of 16, without its sign. What is not finite is the largest.
inline int32_t bits_of_largest(const bf16* x, int size) {
  Ints largest = no_ints();
  for (int i = 0; i < size; i += 16) largest = max(largest, bits_of_absolute(widen(x + i)));
  return max_of(largest);
}

// A head as the cache stores it: integers up to 127, by the definition of `kernels.reference.quantize_heads`.
inline float quantize_head(const bf16* x, int head_dim, int8_t* quantized) {
  const float largest = float_of_bits(bits_of_largest(x, head_dim));
  if (!std::isfinite(largest)) {
    std::fill_n(quantized, head_dim, int8_t(0));
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = std::max(largest / 127, std::numeric_limits<float>::min());
  for (int d = 0; d < head_dim; d += 16) store_int8(quantized + d, div(widen(x + d), fill(scale)));
  return scale;
}

// A query, as what is multiplied with integers of the cache: 15 bits and a sign, by a power of two that the largest
// gives. What is not finite makes it a NaN.
inline float quantize_query(const bf16* x, int head_dim, int16_t* quantized) {
  constexpr int least = 30;  // of 2^-97 and below, whose factor might be none: scores of nothing
  const int exponent = bits_of_largest(x, head_dim) >> 23;
  if (exponent < least || exponent == 255) {
    std::fill_n(quantized, head_dim, int16_t(0));
    return exponent < least ? 1 : std::numeric_limits<float>::quiet_NaN();
  }
  // Numbers below 2^(exponent - 126) become numbers below 2^15.
  const Floats factor = fill(power_of_two(141 - exponent));
  for (int d = 0; d < head_dim; d += 16) store_int16(quantized + d, mul(widen(x + d), factor));
  return power_of_two(exponent - 141);
}

}  // namespace PAGEMILL_ISA
