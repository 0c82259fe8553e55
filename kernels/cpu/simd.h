// Sixteen floats, and sixteen pairs of bfloat16 or of integers, in the two instruction sets that are served.
//
// A pair is two neighbours of the dimension that a product sums over: one `dot` adds both of their products to a lane.
// Each file that includes this is compiled for one instruction set, see avx512.cpp and avx2.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace PAGEMILL_ISA {

using bf16 = uint16_t;

// Into the second-level cache: the first level has too few lines under way for a memory's delay (18 against 29 GB/s).
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#ifdef PAGEMILL_AVX512

using Floats = __m512;
using Pairs = __m512i;

using Ints = __m512i;  // sixteen of 32 bits

constexpr int kRows = 6;  // of a product at a time: with four panels, 24 sums in registers

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats fill(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float max_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
inline Pairs fill_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
inline Floats dot(Floats sum, Pairs a, Pairs b) {
  // With the intrinsic, GCC copies each sum to another register and back, and runs out of them.
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline Pairs load_pairs(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Ints dot_ints(Ints sum, Pairs a, Pairs b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline void store_int16(int16_t* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
inline void store_int8(int8_t* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x))); }
inline Ints bits_of_absolute(Floats x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }
inline Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline int32_t max_of(Ints x) { return _mm512_reduce_max_epi32(x); }
// Lanes first <= i < last keep their value, the others become `other`.
inline Floats keep(Floats x, int first, int last, Floats other) {
  uint32_t below_last = last >= 16 ? 0xffffu : (last <= 0 ? 0u : (1u << last) - 1);
  uint32_t below_first = first >= 16 ? 0xffffu : (first <= 0 ? 0u : (1u << first) - 1);
  return _mm512_mask_blend_ps(__mmask16(below_last & ~below_first), other, x);
}
// 2^x for x <= 127; what is below the least normal number becomes 0, or about that. Of a NaN, a NaN.
inline Floats exp2(Floats x) {
  x = max(fill(-200.0f), x);
  Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats part = sub(x, whole);
  Floats y = fill(1.5403530e-4f);
  y = fma(y, part, fill(1.3333558e-3f));
  y = fma(y, part, fill(9.6181291e-3f));
  y = fma(y, part, fill(5.5504109e-2f));
  y = fma(y, part, fill(2.4022651e-1f));
  y = fma(y, part, fill(6.9314718e-1f));
  y = fma(y, part, fill(1.0f));
  return _mm512_scalef_ps(y, whole);
}
// 2^x within 2^-17 of it, for x <= 127; of what is below the least number, 0.
inline Floats exp2_of_weight(Floats x) {
  Floats part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Floats y = fill(1.3534168e-2f);
  y = fma(y, part, fill(5.2011461e-2f));
  y = fma(y, part, fill(2.4144276e-1f));
  y = fma(y, part, fill(6.9300384e-1f));
  y = fma(y, part, fill(1.0000026f));
  return _mm512_scalef_ps(y, x);
}
inline Floats widen(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline __m256i narrow_slowly(Floats x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc0)));
}
inline __m256i narrow(Floats x) {
  // The instruction takes denormal numbers for zero, and torch does not.
  constexpr int denormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(x, denormal), 0)) return narrow_slowly(x);
  return (__m256i)_mm512_cvtneps_pbh(x);
}
inline void store_narrow(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
inline Floats rounded(Floats x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16));
}

// For numbers whose denormal values do not count: it takes those for zero.
inline void store_weights(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }

#else  // AVX2

struct Floats {
  __m256 low, high;
};
struct Pairs {
  __m256i low, high;
};

struct Ints {
  __m256i low, high;
};

constexpr int kRows = 2;

inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline float sum_of(Floats x) {
  __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_of(Floats x) {
  __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline Pairs load_pairs(const bf16* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 16))};
}
inline Pairs fill_pair(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline __m256 dot8(__m256 sum, __m256i a, __m256i b) {
  const __m256i odd = _mm256_set1_epi32(int(0xffff0000));
  sum = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sum);
  return _mm256_fmadd_ps(
      _mm256_castsi256_ps(_mm256_and_si256(a, odd)), _mm256_castsi256_ps(_mm256_and_si256(b, odd)), sum);
}
inline Floats dot(Floats sum, Pairs a, Pairs b) { return {dot8(sum.low, a.low, b.low), dot8(sum.high, a.high, b.high)}; }
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Pairs load_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
inline Ints dot_ints(Ints sum, Pairs a, Pairs b) {
  return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
          _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline __m256i to_int16(Floats x) {
  // The packing works in halves of 128 bits, and interleaves them.
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0b11011000);
}
inline void store_int16(int16_t* p, Floats x) { _mm256_storeu_si256((__m256i*)p, to_int16(x)); }
inline void store_int8(int8_t* p, Floats x) {
  const __m256i words = to_int16(x);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline Ints bits_of_absolute(Floats x) {
  const __m256i rest = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(rest, _mm256_castps_si256(x.low)), _mm256_and_si256(rest, _mm256_castps_si256(x.high))};
}
inline Ints max(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
inline int32_t max_of(Ints x) {
  const __m256i eight = _mm256_max_epi32(x.low, x.high);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0b10110001)));
}
inline __m256 keep8(__m256 x, int first, int last, __m256 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(last), lane));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}
inline Floats keep(Floats x, int first, int last, Floats other) {
  return {keep8(x.low, first, last, other.low), keep8(x.high, first - 8, last - 8, other.high)};
}
inline __m256 exp2_8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);
  __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 part = _mm256_sub_ps(x, whole);
  __m256 y = _mm256_set1_ps(1.5403530e-4f);
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.3333558e-3f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(9.6181291e-3f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(5.5504109e-2f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(2.4022651e-1f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(6.9314718e-1f));
  y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.0f));
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(exponent));
}
inline Floats exp2(Floats x) { return {exp2_8(x.low), exp2_8(x.high)}; }
inline Floats exp2_of_weight(Floats x) { return exp2(x); }
inline __m256 widen8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats widen(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256i narrow8(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store_narrow(bf16* p, Floats x) {
  // The packing works in halves of 128 bits, and interleaves them.
  __m256i packed = _mm256_packus_epi32(narrow8(x.low), narrow8(x.high));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0b11011000));
}

inline Floats rounded(Floats x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(narrow8(x.low), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(narrow8(x.high), 16))};
}

inline void store_weights(bf16* p, Floats x) { store_narrow(p, x); }

#endif

inline float float_of_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// For the exponents of normal numbers.
inline float power_of_two(int exponent) { return float_of_bits((exponent + 127) << 23); }

}  // namespace PAGEMILL_ISA
