#include "gemm.h"

#include "room.h"

namespace gemm {
namespace {

constexpr int64_t DEPTH = 2048;  // Inputs of a panel at most, so that it stays in the cache.
constexpr int64_t FETCHED = 32;  // Bytes of the next panel that an input's sums hide.
constexpr int64_t FEWEST_ROWS = 96;  // Rows that are worth a weight's panel of their own.
constexpr int64_t MOST_ROWS = 512;  // Rows that share one.

struct AllRows;
struct SomeOutputs;

// One tile: ROWS rows of x times OUTPUTS rows of the weight. Beside it, memory is fetched early.
void multiply(const float* x, const float* weight, int64_t depth, Vec (*sums)[VECTORS],
              const char* early) {
  Vec held[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < depth; k++) {
    Vec w[VECTORS];
    __builtin_prefetch(early + k * FETCHED, 0, 2);
    for (int v = 0; v < VECTORS; v++) w[v] = load(weight + k * OUTPUTS + v * W);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) held[r][v] += x[k * ROWS + r] * w[v];
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = held[r][v];
}

// Adds a tile to y, or writes it there with the bias.
void leave(const Vec (*sums)[VECTORS], float* y, int64_t y_stride, int64_t rows,
           int64_t outputs, const float* bias, bool first) {
  for (int64_t r = 0; r < rows; r++) {
    float* to = y + r * y_stride;
    if (outputs == OUTPUTS) {
      for (int v = 0; v < VECTORS; v++) {
        Vec sum = sums[r][v];
        if (!first) sum += load(to + v * W);
        else if (bias) sum += load(bias + v * W);
        store(to + v * W, sum);
      }
      continue;
    }
    for (int64_t o = 0; o < outputs; o++) {
      const float sum = sums[r][o / W][o % W];
      to[o] = sum + (first ? bias ? bias[o] : 0.f : to[o]);
    }
  }
}

// Rows of x from one input on: a panel for every ROWS of them, filled up with zeros.
void row_panel(float* to, const Problem& p, int64_t tile, int64_t input, int64_t depth) {
  for (int64_t r = 0; r < ROWS; r++) {
    const int64_t row = tile * ROWS + r;
    const float* from = p.x + row * p.x_stride + input;
    for (int64_t k = 0; k < depth; k++) to[k * ROWS + r] = row < p.rows ? from[k] : 0.f;
  }
}

struct Bytes {
  const char* begin;
  int64_t count;
};

// Outputs of one panel of the weight, for rows of so many tiles; `next` is fetched meanwhile.
void panel_outputs(const Problem& p, const float* xs, const float* weight, int64_t output,
                   int64_t first_tile, int64_t end_tile, int64_t depth, bool first, Bytes next) {
  const int64_t outputs = std::min<int64_t>(OUTPUTS, p.outputs - output);
  for (int64_t tile = first_tile, fetched = 0; tile < end_tile; tile++) {
    const float* x = xs + tile * ROWS * depth;
    const bool all = fetched + depth * FETCHED > next.count;
    Vec sums[ROWS][VECTORS];
    multiply(x, weight, depth, sums, all ? (const char*)x : next.begin + fetched);
    fetched += all ? 0 : depth * FETCHED;
    const int64_t row = tile * ROWS, rows = std::min<int64_t>(ROWS, p.rows - row);
    leave(sums, p.y + row * p.y_stride + output, p.y_stride, rows, outputs,
          p.bias ? p.bias + output : nullptr, first);
  }
}

// How tiles of rows are divided: each block of them stays in the cache while all panels of the
// weight go by. There are more where panels are too few for all threads.
int64_t row_blocks(int64_t tiles, int64_t panels, int threads) {
  const int64_t rows = tiles * ROWS, cached = (rows + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t wanted = (4 * threads + panels - 1) / panels;
  return std::max(cached, std::min(wanted, rows / FEWEST_ROWS));
}

}  // namespace

void linear(const Problem& p, const Weight& weight, int threads) {
  const int64_t parts = (p.inputs + DEPTH - 1) / DEPTH;
  const int64_t depth = ((p.inputs + parts - 1) / parts + UNIT - 1) / UNIT * UNIT;
  const int64_t tiles = (p.rows + ROWS - 1) / ROWS;
  const int64_t panels = (p.outputs + OUTPUTS - 1) / OUTPUTS;
  const int64_t blocks = row_blocks(tiles, panels, threads);
  float* xs = room<AllRows>(tiles * ROWS * std::min(depth, p.inputs));
#pragma omp parallel num_threads(threads) if (panels * blocks > 1)
  for (int64_t input = 0; input < p.inputs; input += depth) {
    const int64_t some = std::min(depth, p.inputs - input);
    float* values = room<SomeOutputs>(OUTPUTS * some);
#pragma omp for
    for (int64_t tile = 0; tile < tiles; tile++)
      row_panel(xs + tile * ROWS * some, p, tile, input, some);
#pragma omp for schedule(dynamic, 1)
    for (int64_t piece = 0; piece < panels * blocks; piece++) {
      const int64_t block = piece / panels, output = piece % panels * OUTPUTS;
      const int64_t next = output + threads * OUTPUTS;
      const bool whole = some == p.inputs && next + OUTPUTS <= p.outputs;
      weight.panel(values, output, input, some);
      panel_outputs(p, xs, values, output, tiles * block / blocks, tiles * (block + 1) / blocks,
                    some, input == 0,
                    {weight.rows + next * weight.row_bytes, whole ? OUTPUTS * weight.row_bytes : 0});
    }
  }
}

}  // namespace gemm
