// Products of 8-bit integers: rows are quantised one by one as they come, weights were when they were packed.
//
// weight  [panels][in / 4][2][16][4], padded with zeros to whole panels, see outputs.h, and `in` to blocks of 64: what
//         is multiplied by the same four numbers of a row lies side by side
//
// Sums of integers are exact, so that a row has the same bits whatever shares its batch.
#pragma once

#include "outputs.h"
#include "panels.h"
#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

constexpr ptrdiff_t kBlock = 64;  // numbers that are turned together

#ifdef PAGEMILL_AVX512

// vpdpbusd multiplies unsigned by signed: rows are stored with 128 added, and sums begin with as much less.
inline __m512i begin(const int32_t* weight_sums) {
  return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_loadu_si512(weight_sums), 7));
}
// Of 16 outputs each.
struct Sums {
  __m512i first, second;
  Sums() = default;
  explicit Sums(const int32_t* weight_sums)
      : first(begin(weight_sums)), second(begin(weight_sums + 16)) {}
};
struct Weights {
  __m512i first, second;
  explicit Weights(const int8_t* p) : first(_mm512_loadu_si512(p)), second(_mm512_loadu_si512(p + 64)) {}
};
inline void add_products(Sums& sums, const uint8_t* x, const Weights& weights) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m512i all = _mm512_set1_epi32(four);
  // With the intrinsic, GCC copies each sum to another register and back, and runs out of them.
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.first) : "v"(all), "v"(weights.first));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.second) : "v"(all), "v"(weights.second));
}
inline Floats first_of(const Sums& sums) { return _mm512_cvtepi32_ps(sums.first); }
inline Floats second_of(const Sums& sums) { return _mm512_cvtepi32_ps(sums.second); }
// Sixteen numbers from -127 to 127, rounded to the nearest, halves to even.
inline void store_quantized(uint8_t* p, Floats x) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
  _mm_storeu_si128((__m128i*)p, _mm_xor_si128(bytes, _mm_set1_epi8(int8_t(0x80))));
}

// Lane i beside lane i ^ distance: their sum in the one where that bit is clear, their difference in the other.
template <int distance>
inline Floats turn(Floats x) {
  const __m512 other = _mm512_permute_ps(x, distance == 2 ? 0b01001110 : 0b10110001);
  return _mm512_mask_sub_ps(_mm512_add_ps(other, x), distance == 2 ? 0xcccc : 0xaaaa, other, x);
}

using Magnitudes = __m512i;
inline Magnitudes no_magnitudes() { return _mm512_setzero_si512(); }
inline Magnitudes larger(Magnitudes a, Floats x) {
  return _mm512_max_epu32(a, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}
inline uint32_t largest_of(Magnitudes x) { return _mm512_reduce_max_epu32(x); }

#else  // AVX2

inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
struct Sums {
  __m256i eight[4];
  Sums() = default;
  explicit Sums(const int32_t*) {
    for (__m256i& sum : eight) sum = _mm256_setzero_si256();
  }
};
struct Weights {
  const int8_t* bytes;
  explicit Weights(const int8_t* p) : bytes(p) {}
};
inline void add_products(Sums& sums, const uint8_t* x, const Weights& weights) {
  int32_t four;
  std::memcpy(&four, x, 4);
  const __m256i all = _mm256_set1_epi32(four), magnitude = _mm256_abs_epi8(all);
  for (int i = 0; i < 4; ++i) {
    // Two products of an unsigned and a signed byte pass 16 bits; those of magnitudes up to 127 do not.
    const __m256i turned = _mm256_sign_epi8(load_bytes(weights.bytes + 32 * i), all);
    const __m256i pairs = _mm256_maddubs_epi16(magnitude, turned);
    sums.eight[i] = _mm256_add_epi32(sums.eight[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}
inline Floats first_of(const Sums& sums) {
  return {_mm256_cvtepi32_ps(sums.eight[0]), _mm256_cvtepi32_ps(sums.eight[1])};
}
inline Floats second_of(const Sums& sums) {
  return {_mm256_cvtepi32_ps(sums.eight[2]), _mm256_cvtepi32_ps(sums.eight[3])};
}
inline void store_quantized(uint8_t* p, Floats x) {
  // The packing works in halves of 128 bits, and interleaves them.
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  words = _mm256_permute4x64_epi64(words, 0b11011000);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

template <int distance>
inline __m256 turn8(__m256 x) {
  const __m256 other = _mm256_permute_ps(x, distance == 2 ? 0b01001110 : 0b10110001);
  constexpr int upper = distance == 2 ? 0b11001100 : 0b10101010;
  return _mm256_blend_ps(_mm256_add_ps(other, x), _mm256_sub_ps(other, x), upper);
}
template <int distance>
inline Floats turn(Floats x) {
  return {turn8<distance>(x.low), turn8<distance>(x.high)};
}

using Magnitudes = __m256i;
inline Magnitudes no_magnitudes() { return _mm256_setzero_si256(); }
inline Magnitudes larger8(Magnitudes a, __m256 x) {
  return _mm256_max_epu32(a, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)));
}
inline Magnitudes larger(Magnitudes a, Floats x) { return larger8(larger8(a, x.low), x.high); }
inline uint32_t largest_of(Magnitudes x) {
  uint32_t all[8];
  _mm256_storeu_si256((__m256i*)all, x);
  return *std::max_element(all, all + 8);
}

#endif

// As `turn_blocks` of `kernels.reference`.
inline Magnitudes turn_block(const bf16* x, float* out, Magnitudes largest) {
  const Floats a = widen(x), b = widen(x + 16), c = widen(x + 32), d = widen(x + 48);
  const Floats ac = add(a, c), bd = add(b, d), a_c = sub(a, c), b_d = sub(b, d);
  const Floats quarters[4] = {add(ac, bd), sub(ac, bd), add(a_c, b_d), sub(a_c, b_d)};
  for (int i = 0; i < 4; ++i) {
    const Floats turned = turn<1>(turn<2>(quarters[i]));
    store(out + 16 * i, turned);
    largest = larger(largest, turned);
  }
  return largest;
}

// `turned` has room for `padded` numbers.
inline float quantize_row(const bf16* x, ptrdiff_t size, ptrdiff_t padded, float* turned, uint8_t* out) {
  Magnitudes magnitudes = no_magnitudes();
  const ptrdiff_t whole = size / kBlock * kBlock;
  for (ptrdiff_t i = 0; i < whole; i += kBlock) magnitudes = turn_block(x + i, turned + i, magnitudes);
  if (whole < size) {
    bf16 last[kBlock] = {};
    std::memcpy(last, x + whole, (size - whole) * sizeof(bf16));
    magnitudes = turn_block(last, turned + whole, magnitudes);
  }
  // Bits of magnitudes are in the order of what they stand for, infinities and NaN last.
  const uint32_t bits = largest_of(magnitudes);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  // What is not finite makes all outputs of its row so.
  if (!std::isfinite(largest)) return std::numeric_limits<float>::quiet_NaN();
  // The reciprocal of less than the least normal number would not be finite.
  const float scale = std::max(largest / 127, std::numeric_limits<float>::min());
  const Floats inverse = fill(1 / scale);
  for (ptrdiff_t i = 0; i < padded; i += 16) store_quantized(out + i, mul(load(turned + i), inverse));
  return scale;
}

struct Int8Tiles {
  const Int8Call& call;

  template <int rows>
  void multiply(int64_t row, ptrdiff_t panel) const {
    const ptrdiff_t column = panel * kPanel, size = call.in_padded;
    const int8_t* weight = call.weight + column * size;
    const uint8_t* x = call.quantized + row * size;
    Sums sums[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sums[r] = Sums(call.weight_sums + column);
    for (ptrdiff_t i = 0; i < size; i += 4) {
      const Weights weights(weight + i * kPanel);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) add_products(sums[r], x + r * size + i, weights);
    }
    ProductTile tile(row, rows, panel);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const Floats scale = fill(call.row_scales[row + r]);
      Floats first = mul(mul(first_of(sums[r]), scale), load(call.weight_scales + column));
      Floats second = mul(mul(second_of(sums[r]), scale), load(call.weight_scales + column + 16));
      if (call.bias) {
        first = add(first, load(call.bias + column));
        second = add(second, load(call.bias + column + 16));
      }
      tile.set(r, first, second);
    }
    store_tile(call.outputs, tile);
  }
};

void int8_linear(const Int8Call& call) {
#pragma omp parallel
  {
    const std::unique_ptr<float[]> turned(new float[call.in_padded]);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < call.rows; ++row)
      call.row_scales[row] = quantize_row(call.x + row * call.x_stride, call.in_size, call.in_padded, turned.get(),
                                          call.quantized + row * call.in_padded);
    multiply_panels(Int8Tiles{call});
  }
}

}  // namespace PAGEMILL_ISA
