// From logits to tokens: the largest of each row, and draws by Gumbel noise.
//
// The noise of a token, -log(-log(1 - u)), falls as u rises, and u is a random word of Philox-4x32-10. To win against
// what has been found so far a token needs u < e^(its score - that), which of 64 neighbours mostly none has: their
// words are compared with the bound of the largest score among them, and no logarithm is taken.
#pragma once

#include <cfloat>
#include <cmath>

#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

constexpr int kCounters = 16;  // of Philox at a time, for four words each
constexpr int kTokens = 4 * kCounters;
// What float32 may lose between the definition's sum of score and noise and the one here.
constexpr double kClose = 1e-4;

struct Row {
  const bf16* narrow;
  const float* wide;
  ptrdiff_t size;

  Row(const Logits& logits, int64_t row)
      : narrow(logits.narrow ? logits.narrow + row * logits.size : nullptr),
        wide(logits.narrow ? nullptr : logits.wide + row * logits.size),
        size(logits.size) {}

  float operator[](ptrdiff_t i) const {
    if (wide) return wide[i];
    const uint32_t bits = uint32_t(narrow[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  // Sixteen from i on; what lies beyond the end is -inf.
  Floats at(ptrdiff_t i) const {
    if (i + 16 <= size) return wide ? load(wide + i) : widen(narrow + i);
    float padded[16];
    for (int lane = 0; lane < 16; ++lane) padded[lane] = i + lane < size ? (*this)[i + lane] : -INFINITY;
    return load(padded);
  }
};

// The largest, or NaN where one is NaN or infinite.
inline float largest_of(const Row& row) {
  Floats most[2] = {fill(-INFINITY), fill(-INFINITY)}, bad[2] = {zeros(), zeros()};
  for (ptrdiff_t i = 0; i < row.size; i += 32)
    for (int half = 0; half < 2; ++half) {
      const Floats x = row.at(i + 16 * half);
      most[half] = max(most[half], x);
      // Nothing times zero is NaN but what is not finite; -inf is a token that is ruled out.
      bad[half] = fma(max(fill(-FLT_MAX), x), zeros(), bad[half]);
    }
  return max_of(max(most[0], most[1])) + sum_of(add(bad[0], bad[1]));
}

// The first place of `value`, or 0.
inline ptrdiff_t place_of(const Row& row, float value) {
  for (ptrdiff_t i = 0; i < row.size; i += 16) {
    if (max_of(row.at(i)) != value) continue;
    for (ptrdiff_t place = i; place < i + 16; ++place)
      if (row[place] == value) return place;
  }
  return 0;
}

void largest(const LargestCall& call) {
#pragma omp parallel for schedule(static)
  for (int64_t index = 0; index < call.logits.num_rows; ++index) {
    const Row row(call.logits, index);
    call.values[index] = largest_of(row);
    call.places[index] = place_of(row, call.values[index]);
  }
}

// Unsigned words of 32 bits, each in the low half of a lane of 64, as products take them.
#ifdef PAGEMILL_AVX512
using Words = __m512i;
constexpr int kLanes = 8;
inline Words spread(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
inline Words count_from(uint64_t x) { return _mm512_add_epi64(spread(x), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Words multiply(Words a, Words b) { return _mm512_mul_epu32(a, b); }
inline Words high(Words x) { return _mm512_srli_epi64(x, 32); }
inline Words low(Words x) { return _mm512_and_si512(x, spread(0xffffffff)); }
inline Words differ(Words a, Words b) { return _mm512_xor_si512(a, b); }
inline bool any_up_to(Words x, Words bound) { return _mm512_cmple_epu64_mask(x, bound); }
inline void store(uint64_t* p, Words x) { _mm512_storeu_si512(p, x); }
#else
using Words = __m256i;
constexpr int kLanes = 4;
inline Words spread(uint64_t x) { return _mm256_set1_epi64x(int64_t(x)); }
inline Words count_from(uint64_t x) { return _mm256_add_epi64(spread(x), _mm256_setr_epi64x(0, 1, 2, 3)); }
inline Words multiply(Words a, Words b) { return _mm256_mul_epu32(a, b); }
inline Words high(Words x) { return _mm256_srli_epi64(x, 32); }
inline Words low(Words x) { return _mm256_and_si256(x, spread(0xffffffff)); }
inline Words differ(Words a, Words b) { return _mm256_xor_si256(a, b); }
inline bool any_up_to(Words x, Words bound) { return ~_mm256_movemask_epi8(_mm256_cmpgt_epi64(x, bound)); }
inline void store(uint64_t* p, Words x) { _mm256_storeu_si256((__m256i*)p, x); }
#endif

// The four words of each of sixteen counters.
struct Philox {
  static constexpr int kParts = kCounters / kLanes;
  Words words[4][kParts];

  Philox(uint64_t first, uint64_t seed, uint64_t position) {
    for (int part = 0; part < kParts; ++part) {
      words[0][part] = count_from(first + part * kLanes);
      words[1][part] = spread(position);
      words[2][part] = spread(position >> 32);
      words[3][part] = spread(0);
    }
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int part = 0; part < kParts; ++part) {
        const Words product0 = multiply(words[0][part], spread(0xD2511F53));
        const Words product1 = multiply(words[2][part], spread(0xCD9E8D57));
        // What the high halves of the lanes hold is nobody's business before the end.
        words[0][part] = differ(differ(high(product1), words[1][part]), spread(key0));
        words[2][part] = differ(differ(high(product0), words[3][part]), spread(key1));
        words[1][part] = product1;
        words[3][part] = product0;
      }
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
    for (auto& word : words)
      for (Words& part : word) part = low(part);
  }

  bool any_up_to(uint32_t bound) const {
    bool any = false;
    for (auto& word : words)
      for (const Words& part : word) any |= PAGEMILL_ISA::any_up_to(part, spread(bound));
    return any;
  }
  // By token: word w of counter i is at 4 * i + w.
  void write(uint32_t (&tokens)[kTokens]) const {
    uint64_t lanes[kCounters];
    for (int w = 0; w < 4; ++w) {
      for (int part = 0; part < kParts; ++part) store(lanes + part * kLanes, words[w][part]);
      for (int i = 0; i < kCounters; ++i) tokens[4 * i + w] = uint32_t(lanes[i]);
    }
  }
};

inline double noise_of(uint32_t word) {
  // In float32, as the definition has it.
  const float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
  return -std::log(-std::log1p(-double(u)));
}

struct Draw {
  const Row& row;
  float largest, temperature;
  ptrdiff_t token = 0;
  double sum = -INFINITY;     // of the token's score and noise
  double second = -INFINITY;  // that of the best of the others

  float score(ptrdiff_t i) const { return (row[i] - largest) / temperature; }

  void consider(ptrdiff_t i, uint32_t word) {
    const double candidate = double(score(i)) + noise_of(word);
    if (candidate > sum) {
      second = sum;
      sum = candidate;
      token = i;
    } else if (candidate > second) {
      second = candidate;
    }
  }

  // What a word may be at most for a token with this score to win, or nearly.
  double bound(float score) const { return 0x1p32 * 1.001 * std::exp(double(score) - sum); }
};

inline void draw(const GumbelCall& call, int64_t index) {
  const Row row(call.logits, index);
  const float largest = largest_of(row);
  call.tokens[index] = 0;
  call.sure[index] = true;
  if (!std::isfinite(largest)) return;
  const uint64_t seed = uint64_t(call.seeds[index]), position = uint64_t(call.positions[index]);
  Draw draw{row, largest, call.temperatures[index]};
  uint32_t words[kTokens];
  const ptrdiff_t best = place_of(row, largest);
  Philox(uint64_t(best / 4), seed, position).write(words);
  draw.consider(best, words[best % 4]);
  for (ptrdiff_t first = 0; first < row.size; first += kTokens) {
    Floats most = row.at(first);
    for (int i = 16; i < kTokens; i += 16) most = max(most, row.at(first + i));
    const double exact_bound = draw.bound((max_of(most) - largest) / draw.temperature);
    if (exact_bound < 0.5) continue;
    const uint32_t bound = uint32_t(std::min(exact_bound, double(UINT32_MAX)));
    const Philox philox(uint64_t(first / 4), seed, position);
    if (!philox.any_up_to(bound)) continue;
    philox.write(words);
    for (ptrdiff_t i = 0; i < std::min(ptrdiff_t(kTokens), row.size - first); ++i)
      if (words[i] <= bound && first + i != best) draw.consider(first + i, words[i]);
  }
  call.tokens[index] = draw.token;
  call.sure[index] = draw.sum - draw.second > kClose;
}

void gumbel_argmax(const GumbelCall& call) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t row = 0; row < call.logits.num_rows; ++row) draw(call, row);
}

}  // namespace PAGEMILL_ISA
