// Weights as checkpoints store them: blocks of numbers in few bits, and what scales them.
//
// A form says how many elements and bytes a block has, and gives 32 elements of it (a run) as
// floats: the same as `models/gguf/quants.py` and `models/fp8.py`. GGUF's scale times level has no
// more bits than a float, so that a multiplication and an addition may be rounded once.
#pragma once

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace packed {

constexpr int RUN = 32, VECS = RUN / W;

// W numbers of few bits as integers. GCC's own conversion takes bytes one by one.
#if defined(__AVX512F__)
inline IVec bytes(const void* p) {
  return (IVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline IVec signed_bytes(const void* p) {
  return (IVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
inline IVec halves(const void* p) {
  return (IVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
#elif defined(__AVX2__)
inline IVec bytes(const void* p) {
  return (IVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline IVec signed_bytes(const void* p) {
  return (IVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
inline IVec halves(const void* p) {
  return (IVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
#else
template <class Narrow>
inline IVec integers(const void* from) {
  Narrow v;
  __builtin_memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, IVec);
}
typedef uint8_t BVec __attribute__((vector_size(W)));
typedef int8_t SVec __attribute__((vector_size(W)));
inline IVec bytes(const void* p) { return integers<BVec>(p); }
inline IVec signed_bytes(const void* p) { return integers<SVec>(p); }
inline IVec halves(const void* p) { return integers<HVec>(p); }
#endif

inline Vec floats(IVec v) { return __builtin_convertvector(v, Vec); }

// Of 16 bits each, as in `half_float`.
inline Vec half_floats(IVec bits) {
  const IVec size = bits & 0x7fff;
  const Vec finite = (Vec)(size << 13) * 5.192296858534828e33f;
  const IVec special = (size << 13) + 0x70000000;
  return (Vec)((size >= 0x7c00 ? special : (IVec)finite) | (bits & 0x8000) << 16);
}

template <int... I>
inline IVec counting(std::integer_sequence<int, I...>) {
  return IVec{I...};
}
inline IVec counting() { return counting(std::make_integer_sequence<int, W>()); }

// Of 16 values, those whose numbers are in the last four bits: vectors of 16 only.
inline Vec looked_up(Vec values, IVec numbers) { return __builtin_shuffle(values, numbers); }

inline float half_at(const uint8_t* from) {
  uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  return half_float(bits);
#endif
}

// -- scales ----------------------------------------------------------------------------------------
//
// A form's scales are floats: those of several blocks are made at once, and a run then loads its
// own into all places of a vector, which is cheaper than to make them there.

constexpr int CHUNK = 32;  // Runs whose scales are made together.

// Floats of 16-bit ones.
inline void widen_halves(float* to, const uint16_t* from, int count) {
  for (int i = 0; i < count; i += W) {
#if defined(__AVX512F__)
    store(to + i, (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
    store(to + i, (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#else
    store(to + i, half_floats(halves(from + i)));
#endif
  }
}

// HALVES 16-bit floats at the beginning of every block of 32.
template <int HALVES>
inline void leading_halves(float* to, const uint8_t* from, int blocks, int block_bytes) {
  uint16_t found[CHUNK * HALVES + W];
  for (int i = 0; i < blocks; i++)
    __builtin_memcpy(found + i * HALVES, from + i * block_bytes, 2 * HALVES);
  widen_halves(to, found, blocks * HALVES);
}

// -- plain numbers -------------------------------------------------------------------------------

struct BFloat16 {
  static constexpr int ELEMENTS = 32, BYTES = 64, SCALES = 0;
  static inline void scales(float*, const uint8_t*, int) {}
  static inline void run(Vec* to, const uint8_t* from, int, const float*) {
    for (int i = 0; i < VECS; i++) to[i] = (Vec)(halves(from + 2 * W * i) << 16);
  }
};

struct Float16 {
  static constexpr int ELEMENTS = 32, BYTES = 64, SCALES = 0;
  static inline void scales(float*, const uint8_t*, int) {}
  static inline void run(Vec* to, const uint8_t* from, int, const float*) {
    for (int i = 0; i < VECS; i++) to[i] = half_floats(halves(from + 2 * W * i));
  }
};

// Numbers in e4m3 behind the scale of all 32, in fp32: `models/fp8.py`. Its exponent is 120 less
// than a float's. Codes of NaN, which no weight has, count as 480.
struct F8_E4M3 {
  static constexpr int ELEMENTS = 32, BYTES = 36, SCALES = 1;
  static inline void scales(float* to, const uint8_t* from, int blocks) {
    for (int i = 0; i < blocks; i++) __builtin_memcpy(to + i, from + i * BYTES, sizeof *to);
  }
  static inline void run(Vec* to, const uint8_t* from, int, const float* scale) {
    for (int i = 0; i < VECS; i++) {
      const IVec bits = signed_bytes(from + 4 + W * i) << 20;
      to[i] = (Vec)(bits & (int32_t)0x87f00000) * 0x1p120f * *scale;
    }
  }
};

// -- blocks of 32: a scale, sometimes a least value, and levels ----------------------------------

struct Q8_0 {
  static constexpr int ELEMENTS = 32, BYTES = 34, SCALES = 1;
  static inline void scales(float* to, const uint8_t* from, int blocks) {
    leading_halves<1>(to, from, blocks, BYTES);
  }
  static inline void run(Vec* to, const uint8_t* from, int, const float* scale) {
    for (int i = 0; i < VECS; i++) to[i] = *scale * floats(signed_bytes(from + 2 + W * i));
  }
};

// OFFSET: with a least value. FIFTH: with 32 bits that stand above the nibbles.
template <bool OFFSET, bool FIFTH>
struct Levels {
  static constexpr int ELEMENTS = 32, SCALES = OFFSET ? 2 : 1, HEAD = 2 * SCALES;
  static constexpr int BYTES = HEAD + (FIFTH ? 20 : 16);
  static inline void scales(float* to, const uint8_t* from, int blocks) {
    leading_halves<SCALES>(to, from, blocks, BYTES);
  }
  static inline void run(Vec* to, const uint8_t* from, int, const float* given) {
    const auto value = [=](Vec level) {
      return OFFSET ? given[0] * level + given[1] : given[0] * (level - (FIFTH ? 16.f : 8.f));
    };
    // The low nibbles of 16 bytes come first, then the high ones.
    const uint8_t* packed = from + BYTES - 16;
    if constexpr (W == 16 && !FIFTH) {
      const Vec values = value(floats(counting()));
      const IVec both = bytes(packed);
      to[0] = looked_up(values, both), to[1] = looked_up(values, both >> 4);
    } else {
      for (int i = 0; i < VECS; i++) {
        IVec level = bytes(packed + W * i % 16) >> W * i / 16 * 4 & 15;
        if (FIFTH) level |= fifth(from + HEAD, W * i);
        to[i] = value(floats(level));
      }
    }
  }
  static inline IVec fifth(const uint8_t* bits, int first) {
    int32_t word;
    __builtin_memcpy(&word, bits, sizeof word);
    return (word >> (counting() + first) & 1) << 4;
  }
};

// -- blocks of 256: 8 runs with scales of their own ----------------------------------------------

// FIFTH: 32 bytes before the nibbles have bit r of element i of run r.
template <bool FIFTH>
struct Runs {
  static constexpr int ELEMENTS = 256, BYTES = FIFTH ? 176 : 144, SCALES = 2;
  // Of every run six bits of a scale and of an offset, spread over 12 bytes.
  static inline void scales(float* to, const uint8_t* from, int blocks) {
    for (; blocks > 0; blocks--, from += BYTES, to += 16) {
      const float scale = half_at(from), offset = half_at(from + 2);
      const uint8_t *low = from + 4, *high = from + 8, *rest = from + 12;
      for (int i = 0; i < 4; i++) {
        to[2 * i] = scale * (low[i] & 63), to[2 * i + 1] = offset * (high[i] & 63);
        to[2 * i + 8] = scale * ((rest[i] & 15) | low[i] >> 6 << 4);
        to[2 * i + 9] = offset * (rest[i] >> 4 | high[i] >> 6 << 4);
      }
    }
  }
  static inline void run(Vec* to, const uint8_t* from, int number, const float* given) {
    const float by = given[0], off = given[1];
    const uint8_t* nibbles = from + BYTES - 128 + number / 2 * 32;
    if constexpr (W == 16 && !FIFTH) {
      const Vec values = by * floats(counting()) - off;
      for (int i = 0; i < VECS; i++)
        to[i] = looked_up(values, bytes(nibbles + W * i) >> number % 2 * 4);
    } else {
      for (int i = 0; i < VECS; i++) {
        IVec level = bytes(nibbles + W * i) >> number % 2 * 4 & 15;
        if (FIFTH) level |= (bytes(from + 16 + W * i) >> number & 1) << 4;
        to[i] = by * floats(level) - off;
      }
    }
  }
};

// 128 bytes of nibbles, 64 of two upper bits, 16 scales, of 16 elements each, and theirs.
struct Q6_K {
  static constexpr int ELEMENTS = 256, BYTES = 210, SCALES = 2;
  static inline void scales(float* to, const uint8_t* from, int blocks) {
    for (; blocks > 0; blocks--, from += BYTES, to += 16) {
      const float scale = half_at(from + 208);
      for (int i = 0; i < 16; i += W < 16 ? W : 16)
        store(to + i, scale * floats(signed_bytes(from + 192 + i)));
    }
  }
  static inline void run(Vec* to, const uint8_t* from, int number, const float* given) {
    const int half = number / 4, quarter = number % 4;
    const uint8_t *low = from + half * 64 + quarter % 2 * 32, *high = from + 128 + half * 32;
    for (int i = 0; i < VECS; i++) {
      const IVec nibble = bytes(low + W * i) >> quarter / 2 * 4 & 15;
      const IVec upper = bytes(high + W * i) >> quarter * 2 & 3;
      to[i] = given[W * i / 16] * floats((nibble | upper << 4) - 32);
    }
  }
};

// Calls `with` with the form of this number, as `c_functions.py` numbers them.
template <class Call>
inline void with_form(int number, Call with) {
  switch (number) {
    case 0: return with(BFloat16());
    case 1: return with(Float16());
    case 2: return with(Q8_0());
    case 3: return with(Levels<false, false>());
    case 4: return with(Levels<true, false>());
    case 5: return with(Levels<false, true>());
    case 6: return with(Levels<true, true>());
    case 7: return with(Runs<false>());
    case 8: return with(Runs<true>());
    case 9: return with(Q6_K());
    case 10: return with(F8_E4M3());
  }
}

// Each run of `elements` floats in turn, whole blocks.
template <class Form, class Use>
inline void each_run(const uint8_t* from, int64_t elements, Use use) {
  constexpr int64_t FETCHED = 4096;  // Bytes ahead.
  constexpr int RUNS = Form::ELEMENTS / RUN, BLOCKS = CHUNK / RUNS;
  const int64_t blocks = elements / Form::ELEMENTS;
  for (int64_t first = 0, at = 0; first < blocks; first += BLOCKS) {
    const int some = (int)(blocks - first < BLOCKS ? blocks - first : BLOCKS);
    float scales[CHUNK * Form::SCALES + W];
    Form::scales(scales, from, some);
    for (int block = 0; block < some; block++, from += Form::BYTES) {
      for (int ahead = 0; ahead < Form::BYTES; ahead += 64)
        __builtin_prefetch(from + FETCHED + ahead);
      for (int run = 0; run < RUNS; run++, at += RUN) {
        Vec w[VECS];
        Form::run(w, from, run, scales + (block * RUNS + run) * Form::SCALES);
        use(at, w);
      }
    }
  }
}

template <class Form>
inline void unpack(float* to, const uint8_t* from, int64_t elements) {
  each_run<Form>(from, elements, [to](int64_t at, const Vec* w) {
    for (int i = 0; i < VECS; i++) store(to + at + W * i, w[i]);
  });
}

template <class Form>
inline int64_t stored_bytes(int64_t elements) {
  return elements / Form::ELEMENTS * Form::BYTES;
}

}  // namespace packed
