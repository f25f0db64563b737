// A GEMM of many rows: both operands in panels, so that a tile of results stays in registers.
//
// A panel has the values of a few rows side by side, input by input. Those of x are made once for
// all threads. Those of a weight are made piece by piece, from floats or from what is packed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "vectors.h"

namespace gemm {

#if defined(__AVX512F__)
constexpr int ROWS = 8, VECTORS = 3;
#elif defined(__AVX__)
constexpr int ROWS = 6, VECTORS = 2;
#elif defined(__ARM_NEON)
constexpr int ROWS = 8, VECTORS = 3;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif
constexpr int OUTPUTS = VECTORS * W;    // Of a panel.
constexpr int64_t UNIT = 256;         // Inputs that a panel has a multiple of, but the last one.

// A square of W rows from one input on, or fewer inputs, into the columns of a panel.
inline void transposed(Vec* rows, float* to, int64_t inputs) {
  transpose(rows);
  for (int64_t k = 0; k < std::min<int64_t>(W, inputs); k++) store(to + k * OUTPUTS, rows[k]);
}

// Rows of a weight, one after another, `row_bytes` each.
struct Weight {
  Weight(const void* rows, int64_t row_bytes, int64_t count)
      : rows((const char*)rows), row_bytes(row_bytes), count(count) {}

  // Values of OUTPUTS rows; those behind the last one are like it.
  virtual void panel(float* to, int64_t output, int64_t input, int64_t depth) const = 0;

  const char* rows;
  int64_t row_bytes, count;
};

// y = x times the rows of a weight; that of the problem is not used.
void linear(const Problem& p, const Weight& weight, int threads);

}  // namespace gemm
