// A GEMM of few rows: every weight is read once.
#pragma once

#include <cstdint>

// x times the rows of a weight. Rows of x and of y are `x_stride` and `y_stride` apart.
struct Problem {
  float* y;
  const float *x, *weight, *bias;
  int64_t rows, outputs, inputs, x_stride, y_stride;
};

constexpr int AT_ONCE = 24;  // Outputs of a piece of work.

void outputs_between(const Problem& p, int64_t begin, int64_t end);

// Pieces of work for all threads: `piece(begin, end)` computes the outputs between these.
template <class Piece>
inline void in_pieces(int64_t outputs, int threads, Piece piece) {
  const int64_t pieces = (outputs + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (pieces > 1)
  for (int64_t n = 0; n < pieces; n++) {
    const int64_t begin = n * AT_ONCE, end = begin + AT_ONCE;
    piece(begin, end < outputs ? end : outputs);
  }
}
