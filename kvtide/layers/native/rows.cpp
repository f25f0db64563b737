// Functions of single rows: norms, gated activations, and heads on their way into pages.
#include <cmath>
#include <vector>

#include "calls.h"
#include "vectors.h"

namespace {

constexpr int64_t FEW = 8192;  // Values that one thread takes alone.

float square_sum(const float* x, int64_t width) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + W <= width; i += W) sums += load(x + i) * load(x + i);
  float total = sum(sums);
  for (; i < width; i++) total += x[i] * x[i];
  return total;
}

void norm(float* to, const float* x, const float* weight, int64_t width, float eps) {
  const float scale = 1.f / std::sqrt(square_sum(x, width) / (float)width + eps);
  for (int64_t i = 0; i < width; i++) to[i] = x[i] * scale * weight[i];
}

// A vector's first 2n dimensions turned in pairs (i, i + n); x and `to` may be the same.
void rotate(float* to, const float* x, const float* cos_sin, int64_t pairs, int64_t dim) {
  const float *cosines = cos_sin, *sines = cos_sin + pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const float first = x[i], second = x[i + pairs];
    to[i] = first * cosines[i] - second * sines[i];
    to[i + pairs] = second * cosines[i] + first * sines[i];
  }
  if (to != x)
    for (int64_t i = 2 * pairs; i < dim; i++) to[i] = x[i];
}

enum Activation { SWISH = 0, GELU_TANH = 1, SIGMOID = 2 };

template <int KIND>
inline Vec activated(Vec x) {
  if (KIND == SWISH) return x * sigmoid(x);
  if (KIND == SIGMOID) return sigmoid(x);
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

template <int KIND>
void gate_row(float* to, const float* gate, const float* up, int64_t width) {
  int64_t i = 0;
  for (; i + W <= width; i += W) store(to + i, activated<KIND>(load(gate + i)) * load(up + i));
  if (i == width) return;
  float rest[W] = {};
  __builtin_memcpy(rest, gate + i, (width - i) * 4);
  const Vec opened = activated<KIND>(load(rest));
  for (int64_t j = i; j < width; j++) to[j] = opened[j - i] * up[j];
}

}  // namespace

void kvtide_rms_norm(float* to, float* total, const float* x, const float* y, const float* weight,
                     int64_t rows, int64_t width, int64_t stride, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * stride;
    if (y) {
      float* added = total + row * width;
      for (int64_t i = 0; i < width; i++) added[i] = from[i] + y[row * width + i];
      from = added;
    }
    norm(to + row * width, from, weight, width, eps);
  }
}

void kvtide_gated(float* to, const float* gate, const float* up, int64_t rows, int64_t width,
                  int64_t gate_stride, int64_t up_stride, int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > FEW)
  for (int64_t row = 0; row < rows; row++) {
    float* out = to + row * width;
    const float *g = gate + row * gate_stride, *u = up + row * up_stride;
    if (kind == SWISH) gate_row<SWISH>(out, g, u, width);
    else if (kind == GELU_TANH) gate_row<GELU_TANH>(out, g, u, width);
    else gate_row<SIGMOID>(out, g, u, width);
  }
}

namespace {

// To 16 bits as torch rounds, and what they stand for.
void narrow(uint16_t* to, float* values, int type, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    to[i] = type == BF16 ? bfloat_bits(values[i]) : half_bits(values[i]);
    values[i] = type == BF16 ? bfloat(to[i]) : half_float(to[i]);
  }
}

// A token's keys or values into its entry, and as they were written.
void keep(const Heads& h, char* entry, float* values, const float* from) {
  const int64_t count = (int64_t)h.kv_heads * h.dim;
  if (values != from) __builtin_memcpy(values, from, count * 4);
  if (h.page_type == FP32) {
    if (entry) __builtin_memcpy(entry, values, count * 4);
    return;
  }
  static thread_local std::vector<uint16_t> unseen;
  unseen.resize(count);
  narrow(entry ? (uint16_t*)entry : unseen.data(), values, h.page_type, count);
}

}  // namespace

void kvtide_heads(const Heads* given) {
  const Heads& h = *given;
  const int64_t width = (int64_t)(h.heads + 2 * h.kv_heads) * h.dim;
#pragma omp parallel for num_threads(h.threads) if (h.tokens * width > FEW)
  for (int64_t token = 0; token < h.tokens; token++) {
    const float* turn = h.cos_sin ? h.cos_sin + token * 2 * h.pairs : nullptr;
    const float* from = h.by_head + token * h.token_stride;
    for (int head = 0; head < h.heads + h.kv_heads; head++, from += h.dim) {
      const bool key = head >= h.heads;
      float* to = key ? h.keys + (token * h.kv_heads + head - h.heads) * h.dim
                      : h.queries + (token * h.heads + head) * h.dim;
      const float* weight = key ? h.key_norm : h.query_norm;
      const float* x = from;
      if (weight) norm(to, x, weight, h.dim, key ? h.key_eps : h.query_eps), x = to;
      if (key && h.key_gain != 1.f) {
        for (int i = 0; i < h.dim; i++) to[i] = x[i] * h.key_gain;
        x = to;
      }
      if (turn) rotate(to, x, turn, h.pairs, h.dim);
      else if (x != to) __builtin_memcpy(to, x, h.dim * 4);
    }
    const int32_t* row = h.rows + h.owners[token] * 3;
    const int64_t position = row[2] + token - row[0];
    const int32_t slot = h.slots[h.owners[token] * h.table_width + position / h.page_tokens];
    const int64_t at = slot * h.slot_stride + position % h.page_tokens * h.entry_stride;
    const int64_t place = token * h.kv_heads * h.dim;
    keep(h, slot < 0 ? nullptr : h.key_pages + at, h.keys + place, h.keys + place);
    keep(h, slot < 0 ? nullptr : h.value_pages + at, h.values + place, from);
  }
}
