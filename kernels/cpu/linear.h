// Products of bfloat16, summed in float32.
//
// weight  [panels][in / 2][2][16][2], padded with zeros to whole panels, see outputs.h: what is multiplied by the same
//         pair of a row lies side by side
//
// Each row is summed from its first input to its last, so that it has the same bits whatever shares its batch.
#pragma once

#include "outputs.h"
#include "panels.h"
#include "shapes.h"
#include "simd.h"

namespace PAGEMILL_ISA {

struct LinearTiles {
  const LinearCall& call;

  template <int rows>
  void multiply(int64_t row, ptrdiff_t panel) const {
    const bf16* weight = call.weight + panel * kPanel * call.in_size;
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
    ProductTile tile(row, rows, panel);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      if (call.bias) {
        first[r] = add(first[r], load(call.bias + panel * kPanel));
        second[r] = add(second[r], load(call.bias + panel * kPanel + 16));
      }
      tile.set(r, first[r], second[r]);
    }
    store_tile(call.outputs, tile);
  }
};

void linear(const LinearCall& call) {
#pragma omp parallel
  multiply_panels(LinearTiles{call});
}

}  // namespace PAGEMILL_ISA
