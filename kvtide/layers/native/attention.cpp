// Attention over pages, in place: all sequences of a step at once, with an online softmax.
//
// A piece of work is a run of one sequence's queries, some of its KV heads, and a span of its keys.
// Keys are taken in blocks. A block of keys is transposed once for all query rows of the piece.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "calls.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 64;            // Keys of a block.
constexpr int QUERY_ROWS = 96;       // Query rows of a prefill piece, about: tokens x heads of a KV head.
constexpr int SHORTEST_SPAN = 256;   // Keys that are worth a piece of their own.
constexpr int MANY_ROWS = 2 * 6;      // More read values often enough to have them in one place.
constexpr float HIDDEN = -3e38f, NOTHING = -1e30f;

}  // namespace

namespace {

struct Piece {
  int64_t sequence, first_query, queries, first_key, end_key, partial;
  int first_head, heads;  // KV heads.
};

// What a piece of a divided sequence leaves for the join: by query head, m, l and the sums.
struct Partials {
  std::vector<float> values;
  int64_t stride = 0;
};

struct Shape {
  int each, key_dims, value_dims, padded;  // `padded`: value dims as whole vectors.
  explicit Shape(const Attention& a)
      : each(a.heads / a.kv_heads),
        key_dims(a.key.dim + a.key_rest.dim),
        value_dims(a.value.dim),
        padded((a.value.dim + W - 1) / W * W) {}
};

// Where the vectors of one block's tokens lie, for KV head 0; false where a page has no slot.
bool locate(const Attention& a, const Kept& kept, const Piece& piece, int64_t key, int count,
            const char** at) {
  const int32_t* row = a.rows + piece.sequence * 3;
  const int32_t* slots = a.slots + piece.sequence * a.table_width;
  const int stored = (int)std::min<int64_t>(count, std::max<int64_t>(0, row[2] - key));
  int64_t page = key / a.page_tokens, within = key % a.page_tokens;
  for (int i = 0; i < stored; page++, within = 0) {
    if (slots[page] < 0) return false;
    const char* from = kept.pages + slots[page] * kept.slot_stride + within * kept.entry_stride;
    for (; within < a.page_tokens && i < stored; within++, i++, from += kept.entry_stride)
      at[i] = from;
  }
  const int64_t first = row[0] + key - row[2];
  for (int i = stored; i < count; i++) at[i] = kept.fresh + (first + i) * kept.fresh_stride;
  return true;
}

struct Scratch {
  std::vector<float> memory;
  float *queries, *transposed, *probabilities, *sums, *peaks, *totals, *wide_keys, *wide_values,
      *gains;

  void make(const Shape& s, int64_t rows, int heads) {
    const int64_t all = rows * heads;
    const int64_t sizes[] = {all * s.key_dims,      (int64_t)s.key_dims * BLOCK,
                             rows * BLOCK,          all * s.padded,
                             all,                   all,
                             (int64_t)W * s.key_dims, (int64_t)BLOCK * s.padded,
                             rows + W};
    float** parts[] = {&queries, &transposed, &probabilities, &sums,
                       &peaks,   &totals,     &wide_keys,     &wide_values,
                       &gains};
    int64_t size = 32;
    for (int64_t each : sizes) size += each + 16;
    if ((int64_t)memory.size() < size) memory.resize(size);
    float* next = memory.data() + (-(uintptr_t)memory.data() % 64) / 4;
    for (int i = 0; i < 9; i++) *parts[i] = next, next += (sizes[i] + 15) / 16 * 16;
  }
};

// One part of W keys, transposed into columns [column, column + W).
void transpose_part(const Kept& kept, const float* const* from, float* to) {
  for (int d = 0; d + W <= kept.dim; d += W) {
    Vec square[W];
    for (int i = 0; i < W; i++) square[i] = load(from[i] + d);
    transpose(square);
    for (int i = 0; i < W; i++) store(to + (d + i) * BLOCK, square[i]);
  }
  for (int d = kept.dim / W * W; d < kept.dim; d++)
    for (int i = 0; i < W; i++) to[d * BLOCK + i] = from[i][d];
}

void transpose_keys(const Attention& a, const Piece& piece, int64_t key, int count, int head,
                    const char* const* at, const char* const* rest_at, Scratch& s) {
  const int64_t past = a.rows[piece.sequence * 3 + 2];
  const Kept* parts[] = {&a.key, &a.key_rest};
  const char* const* places[] = {at, rest_at};
  float* to = s.transposed;
  for (int part = 0; part < 2 && parts[part]->dim; part++) {
    const Kept& kept = *parts[part];
    for (int column = 0; column < count; column += W) {
      const float* from[W];
      for (int i = 0; i < W; i++) {
        const int number = std::min(column + i, count - 1);
        const int type = key + number < past ? kept.page_type : kept.fresh_type;
        const int64_t offset = (int64_t)head * kept.dim * (type == FP32 ? 4 : 2);
        const char* vector = places[part][number] + offset;
        from[i] = (const float*)vector;
        if (type != FP32) {
          float* wide = s.wide_keys + i * kept.dim;
          widen(wide, vector, type, kept.dim);
          from[i] = wide;
        }
      }
      transpose_part(kept, from, to + column);
    }
    to += (int64_t)kept.dim * BLOCK;
  }
}

void gather_values(const Attention& a, const Shape& shape, const Piece& piece, int64_t key,
                   int count, int head, const char* const* at, const float** values, Scratch& s) {
  const int64_t past = a.rows[piece.sequence * 3 + 2];
  const bool together = piece.queries * shape.each > MANY_ROWS;
  for (int i = 0; i < count; i++) {
    const int type = key + i < past ? a.value.page_type : a.value.fresh_type;
    const char* vector = at[i] + (int64_t)head * a.value.dim * (type == FP32 ? 4 : 2);
    values[i] = (const float*)vector;
    if (type != FP32 || shape.padded != shape.value_dims || together) {
      float* wide = s.wide_values + (int64_t)i * shape.padded;
      values[i] = wide;
      if (type == FP32 && shape.padded == shape.value_dims) {
        const float* from = (const float*)vector;
        for (int d = 0; d < shape.padded; d += W) store(wide + d, load(from + d));
        continue;
      }
      widen(wide, vector, type, shape.value_dims);
      for (int d = shape.value_dims; d < shape.padded; d++) wide[d] = 0.f;
    }
  }
}

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 2;
#endif

// R rows of left times V vectors' columns of right, which is given by row.
template <int R, int V, class Right>
inline void multiply_tile(const float* left, int64_t left_stride, int depth, const Right& right,
                          float* out, int64_t out_stride, const float* gains) {
  Vec sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      sums[r][v] = gains ? load(out + r * out_stride + v * W) * gains[r] : Vec{};
  for (int k = 0; k < depth; k++) {
    Vec b[V];
    const float* from = right(k);
    for (int v = 0; v < V; v++) b[v] = load(from + v * W);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] += left[r * left_stride + k] * b[v];
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * out_stride + v * W, sums[r][v]);
}

template <int R, class Right>
inline void multiply_rows(const float* left, int64_t left_stride, int depth, const Right& right,
                          int columns, float* out, int64_t out_stride, const float* gains) {
  int column = 0;
  for (; column + TILE_VECTORS * W <= columns; column += TILE_VECTORS * W)
    multiply_tile<R, TILE_VECTORS>(
        left, left_stride, depth, [&](int k) { return right(k) + column; }, out + column,
        out_stride, gains);
  for (; column < columns; column += W)
    multiply_tile<R, 1>(
        left, left_stride, depth, [&](int k) { return right(k) + column; }, out + column,
        out_stride, gains);
}

// out = left x right, or out x gains + left x right.
template <int R, class Right>
inline void multiply(const float* left, int64_t left_stride, int rows, int depth,
                     const Right& right, int columns, float* out, int64_t out_stride,
                     const float* gains) {
  for (; rows >= R; rows -= R) {
    multiply_rows<R>(left, left_stride, depth, right, columns, out, out_stride, gains);
    left += R * left_stride, out += R * out_stride;
    if (gains) gains += R;
  }
  if constexpr (R > 1)
    if (rows)
      multiply<R - 1>(left, left_stride, rows, depth, right, columns, out, out_stride, gains);
}

// Hides scores of keys that a row does not see, and caps the others. Returns the largest.
inline float prepare(float* scores, int64_t first_seen, int64_t end_seen, int columns, float cap,
                     float peak) {
  for (int64_t i = 0; i < std::min<int64_t>(first_seen, columns); i++) scores[i] = HIDDEN;
  for (int64_t i = std::max<int64_t>(end_seen, 0); i < columns; i++) scores[i] = HIDDEN;
  Vec most = spread(peak);
  for (int i = 0; i < columns; i += W) {
    Vec score = load(scores + i);
    if (cap > 0) {
      const Vec capped = hyperbolic_tangent(score / cap) * cap;
      score = score > NOTHING ? capped : score;
      store(scores + i, score);
    }
    most = vmax(most, score);
  }
  return largest(most);
}

// Scores of a row to probabilities, up to the total, which is returned.
inline float soften(float* scores, int columns, float peak) {
  constexpr int TOGETHER = 4;  // Vectors whose sums do not wait for one another.
  Vec sums[TOGETHER] = {};
  int i = 0;
  for (; i + TOGETHER * W <= columns; i += TOGETHER * W) {
    Vec each[TOGETHER];
    for (int v = 0; v < TOGETHER; v++) each[v] = load(scores + i + v * W) - peak;
    for (int v = 0; v < TOGETHER; v++) each[v] = exponential(each[v]);
    for (int v = 0; v < TOGETHER; v++) store(scores + i + v * W, each[v]), sums[v] += each[v];
  }
  for (; i < columns; i += W) {
    const Vec probability = exponential(load(scores + i) - peak);
    store(scores + i, probability);
    sums[0] += probability;
  }
  return sum(sums[0] + sums[1] + sums[2] + sums[3]);
}

void attend_block(const Attention& a, const Shape& shape, const Piece& piece, int64_t key,
                  int count, int head, const float* const* values, Scratch& s) {
  const int64_t rows = piece.queries * shape.each, number = head - piece.first_head;
  const int columns = (count + W - 1) / W * W;
  float *probabilities = s.probabilities, *peaks = s.peaks + number * rows;
  multiply<TILE_ROWS>(
      s.queries + number * rows * shape.key_dims, shape.key_dims, (int)rows, shape.key_dims,
      [&](int d) { return s.transposed + (int64_t)d * BLOCK; }, columns, probabilities, BLOCK,
      nullptr);
  const int64_t past = a.rows[piece.sequence * 3 + 2];
  for (int64_t query = 0, row = 0; query < piece.queries; query++) {
    const int64_t position = past + piece.first_query + query;
    const int64_t first = a.window > 0 ? position + 1 - a.window - key : 0;
    const int64_t end = std::min<int64_t>(position + 1 - key, count);
    for (int i = 0; i < shape.each; i++, row++) {
      s.gains[row] = peaks[row];
      peaks[row] = prepare(probabilities + row * BLOCK, first, end, columns, a.cap, peaks[row]);
      s.gains[row] -= peaks[row];
    }
  }
  for (int64_t row = 0; row < rows; row += W)  // What lies behind the rows is never read.
    store(s.gains + row, exponential(load(s.gains + row)));
  float* totals = s.totals + number * rows;
  for (int64_t row = 0; row < rows; row++)
    totals[row] = totals[row] * s.gains[row] +
                  soften(probabilities + row * BLOCK, columns, peaks[row]);
  multiply<TILE_ROWS>(
      probabilities, BLOCK, (int)rows, count, [&](int k) { return values[k]; }, shape.padded,
      s.sums + number * rows * shape.padded, shape.padded, s.gains);
}

void take_queries(const Attention& a, const Shape& shape, const Piece& piece, Scratch& s) {
  const int64_t rows = piece.queries * shape.each, first = a.rows[piece.sequence * 3];
  for (int h = 0; h < piece.heads; h++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t token = first + piece.first_query + row / shape.each;
      const int64_t head = (piece.first_head + h) * shape.each + row % shape.each;
      const float* from = a.queries + (token * a.heads + head) * shape.key_dims;
      float* to = s.queries + (h * rows + row) * shape.key_dims;
      for (int d = 0; d < shape.key_dims; d++) to[d] = from[d] * a.scale;
    }
}

// The result of one row: its sums over the total, with the head's sink in it.
void finish(const Attention& a, const Shape& shape, int64_t token, int64_t head, float peak,
            float total, const float* sums) {
  float scaled = 1.f;
  if (a.sinks) {
    const float most = std::max(peak, a.sinks[head]);
    scaled = std::exp(peak - most);
    total = total * scaled + std::exp(a.sinks[head] - most);
  }
  float* to = a.out + (token * a.heads + head) * shape.value_dims;
  for (int d = 0; d < shape.value_dims; d++) to[d] = sums[d] * (scaled / total);
}

void leave(const Attention& a, const Shape& shape, const Piece& piece, const Scratch& s,
           Partials& partials) {
  const int64_t rows = piece.queries * shape.each, first = a.rows[piece.sequence * 3];
  for (int h = 0; h < piece.heads; h++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = h * rows + row;
      const int64_t head = (piece.first_head + h) * shape.each + row % shape.each;
      const float* sums = s.sums + at * shape.padded;
      if (piece.partial < 0) {
        const int64_t token = first + piece.first_query + row / shape.each;
        finish(a, shape, token, head, s.peaks[at], s.totals[at], sums);
        continue;
      }
      float* to = partials.values.data() + (piece.partial * a.heads + head) * partials.stride;
      to[0] = s.peaks[at], to[1] = s.totals[at];
      std::copy(sums, sums + shape.value_dims, to + 2);
    }
}

// Asks for a share of the next block: memory is then read beside the sums of this one. Values lie
// behind keys in an entry.
void fetch_early(const Attention& a, const Piece& piece, int head, int count,
                 const char* const* keys) {
  if (piece.queries > 1) return;
  const int64_t bytes = a.value.pages - a.key.pages;
  const int64_t entry = bytes > 0 && bytes * 2 == a.key.entry_stride ? a.key.entry_stride : 0;
  const int64_t begin = entry * (head - piece.first_head) / piece.heads / 64 * 64;
  const int64_t end = entry * (head - piece.first_head + 1) / piece.heads;
  for (int i = 0; i < count; i++)
    for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(keys[i] + at, 0, 2);
}

// False where a key is not resident.
bool run(const Attention& a, const Shape& shape, const Piece& piece, Partials& partials) {
  static thread_local Scratch s;
  const int64_t rows = piece.queries * shape.each, all = rows * piece.heads;
  s.make(shape, rows, piece.heads);
  std::fill(s.sums, s.sums + all * shape.padded, 0.f);
  std::fill(s.peaks, s.peaks + all, NOTHING);
  std::fill(s.totals, s.totals + all, 0.f);
  take_queries(a, shape, piece, s);
  const char *keys[BLOCK], *rests[BLOCK], *values_at[BLOCK], *early[BLOCK];
  const float* values[BLOCK];
  for (int64_t key = piece.first_key; key < piece.end_key; key += BLOCK) {
    const int count = (int)std::min<int64_t>(BLOCK, piece.end_key - key);
    if (!locate(a, a.key, piece, key, count, keys)) return false;
    if (a.key_rest.dim) locate(a, a.key_rest, piece, key, count, rests);
    locate(a, a.value, piece, key, count, values_at);
    const int next = (int)std::min<int64_t>(BLOCK, piece.end_key - key - BLOCK);
    if (next > 0 && !locate(a, a.key, piece, key + BLOCK, next, early)) return false;
    for (int head = piece.first_head; head < piece.first_head + piece.heads; head++) {
      if (next > 0) fetch_early(a, piece, head, next, early);
      transpose_keys(a, piece, key, count, head, keys, rests, s);
      gather_values(a, shape, piece, key, count, head, values_at, values, s);
      attend_block(a, shape, piece, key, count, head, values, s);
    }
  }
  leave(a, shape, piece, s, partials);
  return true;
}

int64_t first_seen(const Attention& a, int64_t position) {
  return a.window > 0 ? std::max<int64_t>(0, position + 1 - a.window) : 0;
}

// One query: all KV heads together, so that memory is read in its order; long ones are divided.
void plan_decode(const Attention& a, int64_t sequence, int64_t span, std::vector<Piece>& pieces,
                 std::vector<int64_t>& divided, int64_t& partials) {
  const int64_t past = a.rows[sequence * 3 + 2], first = first_seen(a, past), end = past + 1;
  const int64_t parts = std::max<int64_t>(1, (end - first + span / 2) / span);
  const int64_t each = ((end - first + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
  if (end - first > each) {
    divided.push_back(sequence);
    divided.push_back(partials);
  }
  for (int64_t key = first; key < end; key += each) {
    const int64_t partial = end - first > each ? partials++ : -1;
    pieces.push_back({sequence, 0, 1, key, std::min(key + each, end), partial, 0, a.kv_heads});
  }
  if (end - first > each) divided.push_back(partials);
}

void plan_prefill(const Attention& a, const Shape& shape, int64_t sequence,
                  std::vector<Piece>& pieces) {
  const int32_t* row = a.rows + sequence * 3;
  const int64_t count = row[1] - row[0], past = row[2];
  const int64_t tokens = std::max<int64_t>(1, QUERY_ROWS / shape.each);
  // The last ones see the most keys: they come first.
  for (int64_t query = (count - 1) / tokens * tokens; query >= 0; query -= tokens) {
    const int64_t some = std::min(tokens, count - query);
    const int64_t first = first_seen(a, past + query), end = past + query + some;
    for (int head = 0; head < a.kv_heads; head++)
      pieces.push_back({sequence, query, some, first, end, -1, head, 1});
  }
}

// The parts of a divided sequence, joined.
void join(const Attention& a, const Shape& shape, int64_t sequence, int64_t begin, int64_t end,
          const Partials& partials) {
  std::vector<float> sums(shape.value_dims);
  for (int64_t head = 0; head < a.heads; head++) {
    float peak = NOTHING, total = 0;
    std::fill(sums.begin(), sums.end(), 0.f);
    auto part = [&](int64_t n) {
      return partials.values.data() + (n * a.heads + head) * partials.stride;
    };
    for (int64_t n = begin; n < end; n++) peak = std::max(peak, part(n)[0]);
    for (int64_t n = begin; n < end; n++) {
      const float scaled = std::exp(part(n)[0] - peak);
      total += part(n)[1] * scaled;
      for (int d = 0; d < shape.value_dims; d++) sums[d] += part(n)[2 + d] * scaled;
    }
    finish(a, shape, a.rows[sequence * 3], head, peak, total, sums.data());
  }
}

}  // namespace

// Whether all keys were resident.
int kvtide_attention(const Attention* given) {
  const Attention& a = *given;
  const Shape shape(a);
  std::vector<Piece> pieces;
  std::vector<int64_t> divided;  // Sequence, first and end partial, by turns.
  int64_t partial_count = 0, singles = 0;
  for (int64_t n = 0; n < a.sequences; n++)
    if (a.rows[n * 3 + 1] - a.rows[n * 3] == 1) {
      const int64_t past = a.rows[n * 3 + 2];
      singles += past + 1 - first_seen(a, past);
    }
  const int64_t span = std::max<int64_t>(SHORTEST_SPAN, singles / (2 * a.threads));
  for (int64_t n = 0; n < a.sequences; n++) {
    const int64_t count = a.rows[n * 3 + 1] - a.rows[n * 3];
    if (count == 1) plan_decode(a, n, span, pieces, divided, partial_count);
    else if (count > 1) plan_prefill(a, shape, n, pieces);
  }
  Partials partials;
  partials.stride = shape.value_dims + 2;
  partials.values.resize(partial_count * a.heads * partials.stride);
  std::atomic<bool> resident{true};
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads) if (pieces.size() > 1)
  for (size_t n = 0; n < pieces.size(); n++)
    if (!run(a, shape, pieces[n], partials)) resident = false;
  for (size_t n = 0; n < divided.size(); n += 3)
    join(a, shape, divided[n], divided[n + 1], divided[n + 2], partials);
  return resident;
}
