// Weights as checkpoints store them: blocks of numbers in few bits, and what scales them.
//
// A form says how many elements and bytes a block has, and gives 32 elements of it (a run) as
// floats: the same as `models/gguf/quants.py`. Scale times level has no more bits than a float, so
// that a multiplication and an addition may be rounded once.
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

// -- plain numbers -------------------------------------------------------------------------------

struct BFloat16 {
  static constexpr int ELEMENTS = 32, BYTES = 64;
  static inline void run(Vec* to, const uint8_t* from, int) {
    for (int i = 0; i < VECS; i++) to[i] = (Vec)(halves(from + 2 * W * i) << 16);
  }
};

struct Float16 {
  static constexpr int ELEMENTS = 32, BYTES = 64;
  static inline void run(Vec* to, const uint8_t* from, int) {
    for (int i = 0; i < VECS; i++) {
      const IVec bits = halves(from + 2 * W * i), size = bits & 0x7fff;
      const Vec finite = (Vec)(size << 13) * 5.192296858534828e33f;  // As in `half_float`.
      const IVec special = (size << 13) + 0x70000000;
      to[i] = (Vec)((size >= 0x7c00 ? special : (IVec)finite) | (bits & 0x8000) << 16);
    }
  }
};

// -- blocks of 32: a scale, sometimes a least value, and levels ----------------------------------

struct Q8_0 {
  static constexpr int ELEMENTS = 32, BYTES = 34;
  static inline void run(Vec* to, const uint8_t* from, int) {
    const float scale = half_at(from);
    for (int i = 0; i < VECS; i++) to[i] = scale * floats(signed_bytes(from + 2 + W * i));
  }
};

// OFFSET: with a least value. FIFTH: with 32 bits that stand above the nibbles.
template <bool OFFSET, bool FIFTH>
struct Levels {
  static constexpr int ELEMENTS = 32, HEAD = OFFSET ? 4 : 2, BYTES = HEAD + (FIFTH ? 20 : 16);
  static inline void run(Vec* to, const uint8_t* from, int) {
    const float scale = half_at(from), least = OFFSET ? half_at(from + 2) : 0.f;
    const auto value = [=](Vec level) {
      return OFFSET ? scale * level + least : scale * (level - (FIFTH ? 16.f : 8.f));
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

// Six bits each of a run's scale and offset, spread over 12 bytes.
inline void scale_and_offset(int run, const uint8_t* packed, int* scale, int* offset) {
  const uint8_t *low = packed, *high = packed + 4, *rest = packed + 8;
  const int i = run & 3;
  *scale = run < 4 ? low[i] & 63 : (rest[i] & 15) | low[i] >> 6 << 4;
  *offset = run < 4 ? high[i] & 63 : rest[i] >> 4 | high[i] >> 6 << 4;
}

// FIFTH: 32 bytes before the nibbles have bit r of element i of run r.
template <bool FIFTH>
struct Runs {
  static constexpr int ELEMENTS = 256, BYTES = FIFTH ? 176 : 144;
  static inline void run(Vec* to, const uint8_t* from, int number) {
    int scale, offset;
    scale_and_offset(number, from + 4, &scale, &offset);
    const float by = half_at(from) * scale, off = half_at(from + 2) * offset;
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
  static constexpr int ELEMENTS = 256, BYTES = 210;
  static inline void run(Vec* to, const uint8_t* from, int number) {
    const int half = number / 4, quarter = number % 4;
    const uint8_t *low = from + half * 64 + quarter % 2 * 32, *high = from + 128 + half * 32;
    const int8_t* scales = (const int8_t*)from + 192 + number * 2;
    const float scale = half_at(from + 208);
    for (int i = 0; i < VECS; i++) {
      const IVec nibble = bytes(low + W * i) >> quarter / 2 * 4 & 15;
      const IVec upper = bytes(high + W * i) >> quarter * 2 & 3;
      to[i] = scale * scales[W * i / 16] * floats((nibble | upper << 4) - 32);
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
  }
}

// Each run of `elements` floats in turn, whole blocks.
template <class Form, class Use>
inline void each_run(const uint8_t* from, int64_t elements, Use use) {
  constexpr int64_t FETCHED = 1024;  // Bytes ahead.
  for (int64_t done = 0; done < elements; from += Form::BYTES) {
    for (int ahead = 0; ahead < Form::BYTES; ahead += 64)
      __builtin_prefetch(from + FETCHED + ahead);
    for (int run = 0; run < Form::ELEMENTS / RUN; run++, done += RUN) {
      Vec w[VECS];
      Form::run(w, from, run);
      use(done, w);
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
