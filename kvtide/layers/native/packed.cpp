// A GEMM with a weight that stays packed: of few rows, every weight is unpacked in registers.
#include "packed.h"

#include <algorithm>

#include "calls.h"
#include "gemm.h"
#include "linear.h"

namespace {

constexpr int DOTS = 4;        // Rows that take a weight together, in registers.
constexpr int FEW = 2 * DOTS;  // More rows are worth panels.

template <class Form, int R>
void dots(const Problem& p, const uint8_t* weight, int64_t outputs) {
  const int64_t row_bytes = packed::stored_bytes<Form>(p.inputs);
  const float* xs[R];
  for (int r = 0; r < R; r++) xs[r] = p.x + r * p.x_stride;
  for (int64_t first = 0; first < outputs; first += W) {
    const int64_t count = outputs - first < W ? outputs - first : W;
    Vec sums[R][W] = {};
    for (int64_t o = 0; o < count; o++) {
      // Each has sums of its own, so that none waits for another.
      Vec totals[R][packed::VECS] = {};
      packed::each_run<Form>(weight + (first + o) * row_bytes, p.inputs,
                             [&](int64_t k, const Vec* w) {
        for (int i = 0; i < packed::VECS; i++)
          for (int r = 0; r < R; r++) totals[r][i] += load(xs[r] + k + W * i) * w[i];
      });
      for (int r = 0; r < R; r++)
        for (int i = 0; i < packed::VECS; i++) sums[r][o] += totals[r][i];
    }
    for (int r = 0; r < R; r++) {
      float totals[W];
      total_all<W>(totals, sums[r]);
      for (int64_t o = 0; o < count; o++)
        p.y[r * p.y_stride + first + o] = totals[o] + (p.bias ? p.bias[first + o] : 0.f);
    }
  }
}

template <class Form>
struct PackedRows : gemm::Weight {
  using gemm::Weight::Weight;
  void panel(float* to, int64_t output, int64_t input, int64_t depth) const override {
    constexpr int RUNS = Form::ELEMENTS / packed::RUN, BLOCKS = packed::CHUNK / RUNS;
    const int64_t blocks = depth / Form::ELEMENTS;
    for (int v = 0; v < gemm::VECTORS; v++) {
      const uint8_t* from[W];
      for (int o = 0; o < W; o++)
        from[o] = (const uint8_t*)rows + packed::stored_bytes<Form>(input) +
                  std::min<int64_t>(output + v * W + o, count - 1) * row_bytes;
      float scales[W][packed::CHUNK * Form::SCALES + W];
      float* column = to + v * W;
      for (int64_t first = 0; first < blocks; first += BLOCKS) {
        const int some = (int)std::min<int64_t>(BLOCKS, blocks - first);
        for (int o = 0; o < W; o++) Form::scales(scales[o], from[o], some);
        for (int run = 0; run < some * RUNS; run++, column += packed::RUN * gemm::OUTPUTS) {
          Vec squares[packed::VECS][W];
          for (int o = 0; o < W; o++) {
            Vec values[packed::VECS];
            Form::run(values, from[o] + run / RUNS * Form::BYTES, run % RUNS,
                      scales[o] + run * Form::SCALES);
            for (int i = 0; i < packed::VECS; i++) squares[i][o] = values[i];
          }
          for (int i = 0; i < packed::VECS; i++)
            gemm::transposed(squares[i], column + i * W * gemm::OUTPUTS, W);
        }
        for (int o = 0; o < W; o++) from[o] += some * Form::BYTES;
      }
    }
  }
};

template <class Form>
void packed_between(Problem p, const uint8_t* weight, int64_t begin, int64_t end) {
  weight += begin * packed::stored_bytes<Form>(p.inputs);
  p.y += begin;
  if (p.bias) p.bias += begin;
  for (; p.rows > 0; p.rows -= DOTS, p.x += DOTS * p.x_stride, p.y += DOTS * p.y_stride) {
    if (p.rows == 1)
      dots<Form, 1>(p, weight, end - begin);
    else if (p.rows == 2)
      dots<Form, 2>(p, weight, end - begin);
    else if (p.rows == 3)
      dots<Form, 3>(p, weight, end - begin);
    else
      dots<Form, DOTS>(p, weight, end - begin);
  }
}

}  // namespace

void kvtide_packed_linear(float* y, const float* x, const uint8_t* weight, const float* bias,
                          int form, int64_t rows, int64_t outputs, int64_t inputs,
                          int64_t y_stride, int threads) {
  const Problem p = {y, x, nullptr, bias, rows, outputs, inputs, inputs, y_stride};
  packed::with_form(form, [&](auto known) {
    using Form = decltype(known);
    if (rows > FEW)
      return gemm::linear(
          p, PackedRows<Form>(weight, packed::stored_bytes<Form>(inputs), outputs), threads);
    in_pieces(outputs, threads, [&](int64_t begin, int64_t end) {
      packed_between<Form>(p, weight, begin, end);
    });
  });
}

void kvtide_unpack(float* to, const uint8_t* from, int form, int64_t rows, int64_t inputs,
                   int threads) {
  packed::with_form(form, [&](auto known) {
    using Form = decltype(known);
    const int64_t row_bytes = packed::stored_bytes<Form>(inputs);
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
      packed::unpack<Form>(to + row * inputs, from + row * row_bytes, inputs);
  });
}
