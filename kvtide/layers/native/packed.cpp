// A GEMM of few rows and a weight that stays packed: every weight is read and unpacked once.
#include "packed.h"

#include <vector>

#include "linear.h"

namespace {

constexpr int DOTS = 4;  // Rows that take a weight together, in registers.

// R rows; where there are fewer, the last one again.
template <class Form, int R>
void dots(const Problem& p, const uint8_t* weight, int64_t outputs) {
  const int64_t row_bytes = packed::stored_bytes<Form>(p.inputs);
  const float* xs[R];
  for (int r = 0; r < R; r++) xs[r] = p.x + (r < p.rows ? r : p.rows - 1) * p.x_stride;
  for (int64_t first = 0; first < outputs; first += W) {
    const int64_t count = outputs - first < W ? outputs - first : W;
    Vec sums[R][W] = {};
    for (int64_t o = 0; o < count; o++) {
      Vec totals[R] = {};
      packed::each_run<Form>(weight + (first + o) * row_bytes, p.inputs,
                             [&](int64_t k, const Vec* w) {
        for (int i = 0; i < packed::VECS; i++)
          for (int r = 0; r < R; r++) totals[r] += load(xs[r] + k + W * i) * w[i];
      });
      for (int r = 0; r < R; r++) sums[r][o] = totals[r];
    }
    for (int r = 0; r < R && r < p.rows; r++) {
      float totals[W];
      total_all<W>(totals, sums[r]);
      for (int64_t o = 0; o < count; o++)
        p.y[r * p.y_stride + first + o] = totals[o] + (p.bias ? p.bias[first + o] : 0.f);
    }
  }
}

// More rows: the outputs' weights are unpacked into the cache.
template <class Form>
void unpacked(const Problem& p, const uint8_t* weight, int64_t outputs) {
  static thread_local std::vector<float> floats;
  floats.resize(outputs * p.inputs);
  packed::unpack<Form>(floats.data(), weight, outputs * p.inputs);
  Problem some = p;
  some.weight = floats.data();
  outputs_between(some, 0, outputs);
}

template <class Form>
void packed_between(Problem p, const uint8_t* weight, int64_t begin, int64_t end) {
  weight += begin * packed::stored_bytes<Form>(p.inputs);
  p.y += begin;
  if (p.bias) p.bias += begin;
  if (p.rows > 2 * DOTS) return unpacked<Form>(p, weight, end - begin);
  for (; p.rows > 0; p.rows -= DOTS, p.x += DOTS * p.x_stride, p.y += DOTS * p.y_stride) {
    if (p.rows == 1)
      dots<Form, 1>(p, weight, end - begin);
    else if (p.rows == 2)
      dots<Form, 2>(p, weight, end - begin);
    else
      dots<Form, DOTS>(p, weight, end - begin);
  }
}

}  // namespace

// `y_stride`: between rows of y, of which these outputs may be a part.
extern "C" void kvtide_packed_linear(float* y, const float* x, const uint8_t* weight,
                                     const float* bias, int form, int64_t rows, int64_t outputs,
                                     int64_t inputs, int64_t y_stride, int threads) {
  const Problem p = {y, x, nullptr, bias, rows, outputs, inputs, inputs, y_stride};
  packed::with_form(form, [&](auto known) {
    in_pieces(outputs, threads, [&](int64_t begin, int64_t end) {
      packed_between<decltype(known)>(p, weight, begin, end);
    });
  });
}

// Rows of a packed weight, one after another, as floats.
extern "C" void kvtide_unpack(float* to, const uint8_t* from, int form, int64_t rows,
                              int64_t inputs, int threads) {
  packed::with_form(form, [&](auto known) {
    using Form = decltype(known);
    const int64_t row_bytes = packed::stored_bytes<Form>(inputs);
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
      packed::unpack<Form>(to + row * inputs, from + row * row_bytes, inputs);
  });
}
