// The C functions, and the structures that they take: `c_functions.py` has the same fields.
#pragma once

#include <cstdint>

extern "C" {

// A vector of every token, by head: in pages, and of the step's new tokens. Strides are in bytes.
struct Kept {
  const char *pages, *fresh;
  int64_t slot_stride, entry_stride, fresh_stride;
  int32_t page_type, fresh_type;
  int32_t dim, unused;
};

struct Attention {
  float* out;
  const float* queries;  // (tokens, heads, dims of keys)
  const int32_t* rows;   // (sequences, 3): first row, end row, tokens before the step
  const int32_t* slots;  // (sequences, table_width)
  const float* sinks;
  Kept key, key_rest, value;  // A key is `key` and then `key_rest`, which may have no dims.
  int64_t table_width, sequences;
  int32_t heads, kv_heads, page_tokens, window, threads, unused;
  float scale, cap;
};

// Queries, keys and values of (tokens, heads + 2 KV heads, dim): norms, a gain, the rotation, and
// keys and values into their pages. `keys` and `values` are as they were written.
struct Heads {
  float *queries, *keys, *values;
  const float *by_head, *cos_sin, *query_norm, *key_norm;
  char *key_pages, *value_pages;
  const int32_t *rows, *owners, *slots;
  int64_t token_stride, slot_stride, entry_stride, table_width, tokens;
  int32_t heads, kv_heads, dim, pairs, page_tokens, threads, page_type;
  float query_eps, key_eps, key_gain;
};

// Rows of a weight in one form, as `packed.h` numbers them; -1 for floats.
struct WeightRows {
  const void* data;
  int64_t count, form;
};

struct Projection {
  const WeightRows* runs;
  const float* bias;
  int64_t run_count, inputs, outputs;
};

// The factors stand side by side in the outputs of `gate_up`.
struct GatedMLP {
  Projection gate_up, down;
  int64_t activation;
};

// Attention with the projections before and behind it. What depends on the step is not filled in.
struct SelfAttention {
  Projection qkv, out;
  Heads heads;
  Attention attention;
};

// What all layers of a step have alike.
struct StepTables {
  const float* cos_sin;
  const int32_t *rows, *owners, *slots;
  int64_t table_width, sequences, tokens, pairs, threads;
};

// Whether all keys were resident.
int kvtide_attention(const Attention* given);
void kvtide_heads(const Heads* given);
void kvtide_gated(float* to, const float* gate, const float* up, int64_t rows, int64_t width,
                  int64_t gate_stride, int64_t up_stride, int kind, int threads);
// to = norm(x), or total = x + y and to = norm(total).
void kvtide_rms_norm(float* to, float* total, const float* x, const float* y, const float* weight,
                     int64_t rows, int64_t width, int64_t stride, float eps, int threads);
void kvtide_linear(float* y, const float* x, const float* weight, const float* bias, int64_t rows,
                   int64_t outputs, int64_t inputs, int threads);
// `y_stride`: between rows of y, of which these outputs may be a part.
void kvtide_packed_linear(float* y, const float* x, const uint8_t* weight, const float* bias,
                          int form, int64_t rows, int64_t outputs, int64_t inputs,
                          int64_t y_stride, int threads);
// Rows of a packed weight, one after another, as floats.
void kvtide_unpack(float* to, const uint8_t* from, int form, int64_t rows, int64_t inputs,
                   int threads);
void kvtide_gated_mlp(const GatedMLP* given, float* out, const float* x, int64_t rows,
                      int threads);
// As `kvtide_attention`.
int kvtide_self_attention(const SelfAttention* given, const StepTables* step, float* out,
                          const float* x);
}
