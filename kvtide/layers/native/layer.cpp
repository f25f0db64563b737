// Parts of a layer in one call: projections, and what stands between them.
#include "calls.h"
#include "room.h"
#include "vectors.h"

namespace {

void project(const Projection& p, float* y, const float* x, int64_t rows, int threads) {
  int64_t first = 0;
  for (int64_t n = 0; n < p.run_count; n++) {
    const WeightRows& run = p.runs[n];
    const float* bias = p.bias ? p.bias + first : nullptr;
    if (run.form < 0)
      kvtide_linear(y, x, (const float*)run.data, bias, rows, p.outputs, p.inputs, threads);
    else
      kvtide_packed_linear(y + first, x, (const uint8_t*)run.data, bias, (int)run.form, rows,
                           run.count, p.inputs, p.outputs, threads);
    first += run.count;
  }
}

struct BetweenProjections;

void point_to(Kept& kept, const float* fresh) {
  kept.fresh = (const char*)fresh;
  kept.fresh_type = FP32;
}

}  // namespace

void kvtide_gated_mlp(const GatedMLP* given, float* out, const float* x, int64_t rows,
                      int threads) {
  const GatedMLP& mlp = *given;
  const int64_t width = mlp.down.inputs;
  float* both = room<BetweenProjections>(3 * rows * width);
  float* opened = both + 2 * rows * width;
  project(mlp.gate_up, both, x, rows, threads);
  kvtide_gated(opened, both, both + width, rows, width, 2 * width, 2 * width,
               (int)mlp.activation, threads);
  project(mlp.down, out, opened, rows, threads);
}

int kvtide_self_attention(const SelfAttention* given, const StepTables* step, float* out,
                          const float* x) {
  Heads h = given->heads;
  Attention a = given->attention;
  const int threads = (int)step->threads;
  const int64_t tokens = step->tokens, kv = (int64_t)h.kv_heads * h.dim;
  const int64_t all = given->qkv.outputs, queries = all - 2 * kv;
  float* by_head = room<BetweenProjections>(tokens * (2 * all + queries));
  h.queries = by_head + tokens * all, h.keys = h.queries + tokens * queries;
  h.values = h.keys + tokens * kv;
  project(given->qkv, by_head, x, tokens, threads);
  h.by_head = by_head, h.token_stride = all;
  h.cos_sin = step->cos_sin, h.pairs = (int32_t)step->pairs, h.tokens = tokens;
  h.rows = step->rows, h.owners = step->owners, h.slots = step->slots;
  h.table_width = step->table_width, h.threads = threads;
  kvtide_heads(&h);
  point_to(a.key, h.keys), point_to(a.value, h.values);
  a.queries = h.queries, a.out = h.values + tokens * kv;
  a.rows = step->rows, a.slots = step->slots, a.table_width = step->table_width;
  a.sequences = step->sequences, a.threads = threads;
  if (!kvtide_attention(&a)) return 0;
  project(given->out, out, a.out, tokens, threads);
  return 1;
}
