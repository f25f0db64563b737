#include "linear.h"

#include "calls.h"
#include "gemm.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 8, OUTPUTS = 3;
#else
constexpr int ROWS = 4, OUTPUTS = 2;
#endif
constexpr int FEW = 16;             // More rows are worth panels.
constexpr int AHEAD = 2 * OUTPUTS;  // Outputs whose weights are fetched early.

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

// Rows of floats, those behind the last one like it.
struct Floats : gemm::Weight {
  using Weight::Weight;
  void panel(float* to, int64_t output, int64_t input, int64_t depth) const override {
    for (int v = 0; v < gemm::VECTORS; v++)
      for (int64_t k = 0; k < depth; k += W) {
        Vec square[W];
        for (int o = 0; o < W; o++) {
          const int64_t row = std::min<int64_t>(output + v * W + o, count - 1);
          const float* from = (const float*)(rows + row * row_bytes) + input + k;
          if (depth - k >= W) {
            square[o] = load(from);
          } else {
            square[o] = Vec{};
            __builtin_memcpy(&square[o], from, (depth - k) * 4);
          }
        }
        gemm::transposed(square, to + k * gemm::OUTPUTS + v * W, depth - k);
      }
  }
};

}  // namespace

// Rows outside, so that a tile of them stays in the first cache, and the weights in the second.
void outputs_between(const Problem& p, int64_t begin, int64_t end) {
  int64_t row = 0;
  for (; row + ROWS <= p.rows; row += ROWS) some_rows<ROWS>(p, row, begin, end);
  if (row < p.rows) last_rows<ROWS - 1>(p, row, begin, end);
}

void kvtide_linear(float* y, const float* x, const float* weight, const float* bias, int64_t rows,
                   int64_t outputs, int64_t inputs, int threads) {
  const Problem p = {y, x, weight, bias, rows, outputs, inputs, inputs, outputs};
  if (rows > FEW) return gemm::linear(p, Floats(weight, inputs * 4, outputs), threads);
  in_pieces(outputs, threads,
            [&](int64_t begin, int64_t end) { outputs_between(p, begin, end); });
}
