// Vectors of floats as wide as the CPU has them, by the compiler's vector extension.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
typedef uint16_t HVec __attribute__((vector_size(W * 2)));

static inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
static inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
static inline Vec spread(float x) { return Vec{} + x; }
static inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec vmin(Vec a, Vec b) { return a < b ? a : b; }


// e^x, with an error of 2 units in the last place; 0 below -87, finite above 88.
static inline Vec exponential(Vec x) {
  const Vec bounded = vmin(vmax(x, spread(-87.f)), spread(88.f));
  const float magic = 12582912.f;  // Adding it rounds to a whole number.
  const Vec n = (bounded * 1.44269504088896341f + magic) - magic;
  Vec f = bounded - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  Vec y = spread(1.9875691500e-4f);
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * f * f + f + 1.f;
  const IVec exponent = (__builtin_convertvector(n, IVec) + 127) << 23;
  const Vec result = y * (Vec)exponent;
  return x < -87.f ? Vec{} : result;
}

static inline Vec sigmoid(Vec x) { return 1.f / (1.f + exponential(-x)); }

static inline Vec hyperbolic_tangent(Vec x) {
  const Vec size = x < 0.f ? -x : x;
  const Vec square = x * x;
  Vec small = spread(-5.70498872745e-3f);
  small = small * square + 2.06390887954e-2f;
  small = small * square - 5.37397155531e-2f;
  small = small * square + 1.33314422036e-1f;
  small = small * square - 3.33332819422e-1f;
  small = small * square * x + x;
  const Vec great = 1.f - 2.f / (exponential(2.f * size) + 1.f);
  const Vec signed_great = x < 0.f ? -great : great;
  return size < 0.625f ? small : signed_great;
}

// -- a square of W vectors, transposed -----------------------------------------------------------

template <int S, int... I>
static inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
  const IVec low = {((I & S) ? W + I - S : I)...}, high = {((I & S) ? W + I : I + S)...};
  const Vec first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
  a = first, b = second;
}

template <int S>
static inline void exchange_all(Vec* rows) {
  for (int i = 0; i < W; i++)
    if (!(i & S)) exchange<S>(rows[i], rows[i | S], std::make_integer_sequence<int, W>());
}

static inline void transpose(Vec* rows) {
  exchange_all<1>(rows);
  exchange_all<2>(rows);
  if (W > 4) exchange_all<4 % W>(rows);
  if (W > 8) exchange_all<8 % W>(rows);
}

// -- sums and maxima over a vector ---------------------------------------------------------------

template <int S, int... I>
static inline Vec rotated(Vec v, std::integer_sequence<int, I...>) {
  const IVec from = {((I + S) % W)...};
  return __builtin_shuffle(v, from);
}
template <int S>
static inline float sum_from(Vec v) {
  if constexpr (S == 0) return v[0];
  else return sum_from<S / 2>(v + rotated<S>(v, std::make_integer_sequence<int, W>()));
}
template <int S>
static inline float largest_from(Vec v) {
  if constexpr (S == 0) return v[0];
  else return largest_from<S / 2>(vmax(v, rotated<S>(v, std::make_integer_sequence<int, W>())));
}
static inline float sum(Vec v) { return sum_from<W / 2>(v); }
static inline float largest(Vec v) { return largest_from<W / 2>(v); }

// The sums of COUNT vectors, at most W of them, one in each place.
template <int S>
static inline Vec added(Vec a, Vec b) {
  exchange<S>(a, b, std::make_integer_sequence<int, W>());
  return a + b;
}
template <int S, int COUNT>
static inline Vec sums_from(const Vec* v, int first) {
  if constexpr (S == 0) return v[first];
  else {
    // Vectors first, first + W / S, ... : those that have the same lower part of their number.
    const Vec a = sums_from<S / 2, COUNT>(v, first);
    if (first + S >= COUNT) return added<S>(a, Vec{});
    return added<S>(a, sums_from<S / 2, COUNT>(v, first + S));
  }
}
template <int COUNT>
static inline Vec sums(const Vec* v) {
  return sums_from<W / 2, COUNT>(v, 0);
}

// The sums of COUNT vectors; whole vectors of sums are stored.
template <int COUNT>
static inline void total_all(float* totals, const Vec* v) {
  if constexpr (COUNT > W) {
    store(totals, sums<W>(v));
    total_all<COUNT - W>(totals + W, v + W);
  } else {
    store(totals, sums<COUNT>(v));
  }
}

// -- other types ---------------------------------------------------------------------------------

enum Type { FP32 = 0, BF16 = 1, FP16 = 2 };

static inline float half_float(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  uint32_t wide = magnitude << 13;
  float value;
  if (magnitude >= 0x7c00) {
    wide += 0x70000000u;  // Infinities and NaN.
    __builtin_memcpy(&value, &wide, 4);
  } else {
    __builtin_memcpy(&value, &wide, 4);
    value *= 5.192296858534828e33f;  // 2^112: also right for subnormal values.
  }
  uint32_t all;
  __builtin_memcpy(&all, &value, 4);
  all |= sign;
  __builtin_memcpy(&value, &all, 4);
  return value;
}

static inline float bfloat(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, and of two the even one.
static inline uint16_t bfloat_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline uint16_t half_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // From 65,520 on.
  if (size < 0x38800000) {  // Subnormal: adding 0.5 leaves multiples of 2^-24 in the last bits.
    float small;
    __builtin_memcpy(&small, &size, 4);
    small += 0.5f;
    uint32_t found;
    __builtin_memcpy(&found, &small, 4);
    return (uint16_t)(sign | (found - 0x3f000000));
  }
  return (uint16_t)(sign | ((size + 0xfff + (size >> 13 & 1)) - 0x38000000) >> 13);
}

static inline void widen(float* to, const void* from, int type, int count) {
  if (type == FP32) {
    __builtin_memcpy(to, from, (size_t)count * 4);
    return;
  }
  const uint16_t* halves = (const uint16_t*)from;
  if (type == FP16) {
    for (int i = 0; i < count; i++) to[i] = half_float(halves[i]);
    return;
  }
  for (int i = 0; i < count; i++) to[i] = bfloat(halves[i]);
}
