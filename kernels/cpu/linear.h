// Products of bfloat16, summed in float32.
//
// weight  [out / 32][in / 2][2][16][2], `out` padded with zeros to whole panels of 32: what is multiplied by the same
//         pair of a row lies side by side
//
// Each row is summed from its first input to its last, so that it has the same bits whatever shares its batch.
#pragma once

#include "glue.h"
#include "panels.h"
#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

struct LinearTiles {
  const LinearCall& call;

  template <int rows>
  void multiply(int64_t row, ptrdiff_t panel) const {
    const ptrdiff_t column = panel * kPanel;
    const bf16* weight = call.weight + column * call.in_size;
    const bf16* x = call.x + row * call.x_stride;
    Floats first[rows], second[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) first[r] = second[r] = zeros();
    for (ptrdiff_t i = 0; i < call.in_size; i += 2) {
      const Pairs w = load_pairs(weight + i * kPanel), v = load_pairs(weight + i * kPanel + 32);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Pairs both = fill_pair(x + r * call.x_stride + i);
        first[r] = dot(first[r], both, w);
        second[r] = dot(second[r], both, v);
      }
    }
    const ptrdiff_t left = call.out_size - column;
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      if (call.bias) {
        first[r] = add(first[r], load(call.bias + column));
        second[r] = add(second[r], load(call.bias + column + 16));
      }
      bf16* out = call.out + (row + r) * call.out_size + column;
      store_some(out, first[r], left);
      if (left > 16) store_some(out + 16, second[r], left - 16);
    }
  }
};

void linear(const LinearCall& call) {
#pragma omp parallel
  multiply_panels(LinearTiles{call});
}

}  // namespace PAGEMILL_ISA
