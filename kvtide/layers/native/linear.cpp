// Rows of x times the rows of a weight as it lies in memory, for few rows: every weight is read once.
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, OUTPUTS = 3;
#else
constexpr int ROWS = 4, OUTPUTS = 2;
#endif
constexpr int AHEAD = 2 * OUTPUTS;  // Outputs whose weights are fetched early.
constexpr int AT_ONCE = 24;  // Outputs of a piece of work: a multiple of OUTPUTS.

struct Problem {
  float* y;
  const float *x, *weight, *bias;
  int64_t rows, outputs, inputs, x_stride, y_stride;
};

template <int COUNT>
inline void total_all(float* totals, const Vec* v) {
  if constexpr (COUNT > W) {
    store(totals, sums<W>(v));
    total_all<COUNT - W>(totals + W, v + W);
  } else {
    store(totals, sums<COUNT>(v));
  }
}

template <int R, int O>
inline void tile(const Problem& p, int64_t row, int64_t output) {
  const float* xs = p.x + row * p.x_stride;
  const float* ws = p.weight + output * p.inputs;
  Vec sums[R][O] = {};
  const int64_t whole = p.inputs / W * W;
  for (int64_t k = 0; k < whole; k += W) {
    Vec w[O];
    for (int o = 0; o < O; o++) {
      w[o] = load(ws + o * p.inputs + k);
      if (row == 0) __builtin_prefetch(ws + (o + AHEAD) * p.inputs + k);
    }
    for (int r = 0; r < R; r++) {
      const Vec x = load(xs + r * p.x_stride + k);
      for (int o = 0; o < O; o++) sums[r][o] += x * w[o];
    }
  }
  float totals[(R * O + W - 1) / W * W];
  total_all<R * O>(totals, &sums[0][0]);
  for (int r = 0; r < R; r++)
    for (int o = 0; o < O; o++) {
      float total = totals[r * O + o];
      for (int64_t k = whole; k < p.inputs; k++)
        total += xs[r * p.x_stride + k] * ws[o * p.inputs + k];
      p.y[(row + r) * p.y_stride + output + o] = total + (p.bias ? p.bias[output + o] : 0.f);
    }
}

template <int R>
inline void some_outputs(const Problem& p, int64_t row, int64_t output, int64_t count) {
  if (count >= OUTPUTS) return tile<R, OUTPUTS>(p, row, output);
  for (int64_t o = 0; o < count; o++) tile<R, 1>(p, row, output + o);
}

template <int R>
inline void some_rows(const Problem& p, int64_t row, int64_t begin, int64_t end) {
  for (int64_t output = begin; output < end; output += OUTPUTS)
    some_outputs<R>(p, row, output, end - output);
}

template <int R>
inline void last_rows(const Problem& p, int64_t row, int64_t begin, int64_t end) {
  if (p.rows - row == R) return some_rows<R>(p, row, begin, end);
  if constexpr (R > 1) last_rows<R - 1>(p, row, begin, end);
}

// Rows outside, so that a tile of them stays in the first cache, and the weights in the second.
void outputs_between(const Problem& p, int64_t begin, int64_t end) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) some_rows<ROWS>(p, row, begin, end);
  if (row < p.rows) last_rows<ROWS - 1>(p, row, begin, end);
}

}  // namespace

extern "C" void kvtide_linear(float* y, const float* x, const float* weight, const float* bias,
                              int64_t rows, int64_t outputs, int64_t inputs, int64_t x_stride,
                              int threads) {
  const Problem p = {y, x, weight, bias, rows, outputs, inputs, x_stride, outputs};
  const int64_t pieces = (outputs + AT_ONCE - 1) / AT_ONCE;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (pieces > 1)
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t begin = piece * AT_ONCE, end = begin + AT_ONCE;
    outputs_between(p, begin, end < outputs ? end : outputs);
  }
}
