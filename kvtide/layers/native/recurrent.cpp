// Recurrences token by token, for few new tokens: from and to recurrent states in pages.
//
// A state lies in the slot of a sequence's last page. Without a slot before the step it is zero;
// without one after it, it is dropped.
#include <cmath>
#include <vector>

#include "vectors.h"

extern "C" {

struct States {
  char* pages;  // Of the last entry of slot 0.
  int64_t slot_stride;
  const int32_t *before, *after;  // Slots by sequence; -1 for none.
  const int32_t* rows;            // (sequences, 3): first row, end row, tokens before the step
  int64_t sequences;
};
}

namespace {

// The state to go on from, in its place after the step or in `spare`.
float* begin(const States& s, int64_t sequence, int64_t offset, int64_t size, float* spare) {
  const int32_t before = s.before[sequence], after = s.after[sequence];
  float* state = after < 0 ? spare : (float*)(s.pages + after * s.slot_stride) + offset;
  if (before < 0) {
    __builtin_memset(state, 0, size * 4);
  } else if (before != after) {
    __builtin_memcpy(state, (float*)(s.pages + before * s.slot_stride) + offset, size * 4);
  }
  return state;
}

void unit(float* to, const float* x, int64_t width, float gain) {
  float squares = 0;
  for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  const float scale = gain / std::sqrt(squares + 1e-6f);
  for (int64_t i = 0; i < width; i++) to[i] = x[i] * scale;
}

}  // namespace

extern "C" {

// The gated delta rule. `inputs` are queries and keys of `key_heads`, and values of `heads`.
void kvtide_delta(float* out, const float* inputs, const float* log_decay, const float* beta,
                  const States* states, int64_t heads, int64_t key_heads, int64_t keys,
                  int64_t values, int64_t decays, int threads) {
  const States& s = *states;
  const int64_t width = 2 * key_heads * keys + heads * values, size = keys * values;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t piece = 0; piece < s.sequences * heads; piece++) {
    static thread_local std::vector<float> spare;
    spare.resize(size + 2 * keys + values);
    float *query = spare.data() + size, *key = query + keys, *missed = key + keys;
    const int64_t sequence = piece / heads, head = piece % heads;
    const int32_t* row = s.rows + sequence * 3;
    if (row[0] == row[1]) continue;
    float* state = begin(s, sequence, head * size, size, spare.data());
    for (int64_t token = row[0]; token < row[1]; token++) {
      const float* from = inputs + token * width;
      const int64_t shared = head / (heads / key_heads) * keys;
      unit(query, from + shared, keys, 1.f / std::sqrt((float)keys));
      unit(key, from + key_heads * keys + shared, keys, 1.f);
      const float* value = from + 2 * key_heads * keys + head * values;
      const float* logs = log_decay + (token * heads + head) * decays;
      float* y = out + (token * heads + head) * values;
      for (int64_t v = 0; v < values; v++) missed[v] = value[v], y[v] = 0;
      for (int64_t k = 0; k < keys; k++) {
        const float decay = std::exp(logs[decays == 1 ? 0 : k]), by = key[k];
        float* line = state + k * values;
        for (int64_t v = 0; v < values; v++) {
          line[v] *= decay;
          missed[v] -= line[v] * by;
        }
      }
      const float strong = beta[token * heads + head];
      for (int64_t v = 0; v < values; v++) missed[v] *= strong;
      for (int64_t k = 0; k < keys; k++) {
        const float by = key[k], asked = query[k];
        float* line = state + k * values;
        for (int64_t v = 0; v < values; v++) {
          line[v] += by * missed[v];
          y[v] += asked * line[v];
        }
      }
    }
  }
}

// Mamba2's scan, without the skip. `inputs` are x of `heads`, and B and C of `groups`.
void kvtide_scan(float* out, const float* inputs, const float* dt, const float* decay,
                 const States* states, int64_t heads, int64_t groups, int64_t dim, int64_t width,
                 int threads) {
  const States& s = *states;
  const int64_t all = heads * dim + 2 * groups * width, size = dim * width;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t piece = 0; piece < s.sequences * heads; piece++) {
    static thread_local std::vector<float> spare;
    spare.resize(size);
    const int64_t sequence = piece / heads, head = piece % heads;
    const int32_t* row = s.rows + sequence * 3;
    if (row[0] == row[1]) continue;
    float* state = begin(s, sequence, head * size, size, spare.data());
    for (int64_t token = row[0]; token < row[1]; token++) {
      const float* x = inputs + token * all + head * dim;
      const float* b = inputs + token * all + heads * dim + head / (heads / groups) * width;
      const float* c = b + groups * width;
      const float step = dt[token * heads + head];
      const float kept = std::exp(step * decay[head]);
      for (int64_t d = 0; d < dim; d++) {
        const float fed = step * x[d];
        float* line = state + d * width;
        Vec sums = {};
        int64_t n = 0;
        for (; n + W <= width; n += W) {
          const Vec now = load(line + n) * kept + load(b + n) * fed;
          store(line + n, now);
          sums += now * load(c + n);
        }
        float total = sum(sums);
        for (; n < width; n++) {
          line[n] = line[n] * kept + b[n] * fed;
          total += line[n] * c[n];
        }
        out[(token * heads + head) * dim + d] = total;
      }
    }
  }
}
}
