// What instruction sets have for the products of `quantised.h`: vectors of bytes and numbers, and sums of products of bytes.
//
// A vector holds four bytes of each of ROWS rows, or one whole number, or a float. All that compilers do with vectors
// themselves is written in C++.

#pragma once

#include <cstring>

#include "quantised.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define PPD_INLINE inline __attribute__((always_inline))

namespace {

template <int NUM_ROWS>
struct Vectors {
  static constexpr int ROWS = NUM_ROWS;
  typedef uint8_t Bytes __attribute__((vector_size(NUM_ROWS * 4)));
  typedef uint16_t Pairs __attribute__((vector_size(NUM_ROWS * 4)));
  typedef int32_t Whole __attribute__((vector_size(NUM_ROWS * 4)));
  typedef float Floats __attribute__((vector_size(NUM_ROWS * 4)));

  static PPD_INLINE Bytes load(const uint8_t* at) {
    Bytes bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    return bytes;
  }
  // What `power_of_two` gives.
  static PPD_INLINE Floats powers_of_two(Whole exponents) {
    return Floats(exponents < 2 ? 0x00200000 << exponents : (exponents - 1) << 23);
  }
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && defined(__F16C__)
#define PPD_HAS_AVX512VNNI

struct Avx512Vnni : Vectors<16> {
  static constexpr int MOST_TOKENS = 8;

  // Sums of products of codes, of at most LARGEST, with a token's numbers: COUNT of four each.
  template <int LARGEST, int COUNT>
  struct Sum {
    static constexpr bool HAS_SIGNS = false;  // of what the codes stand for: without, their offset is still in the sum
    Whole whole = {};

    PPD_INLINE void add(int, Bytes codes, int32_t four) {
      whole = Whole(_mm512_dpbusd_epi32(__m512i(whole), __m512i(codes), _mm512_set1_epi32(four)));
    }
  };

  static PPD_INLINE Bytes table(const uint8_t* at) {
    return Bytes(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  static PPD_INLINE Bytes looked_up(Bytes table, Bytes codes) {
    return Bytes(_mm512_shuffle_epi8(__m512i(table), __m512i(codes)));
  }
  // A byte of each row.
  static PPD_INLINE Whole from_bytes(const uint8_t* at) {
    return Whole(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  static PPD_INLINE Floats to_floats(Whole whole) { return Floats(_mm512_cvtepi32_ps(__m512i(whole))); }
  static PPD_INLINE Floats from_halves(const uint8_t* at) {
    return Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
  }
};
#endif

#if defined(__AVX2__) && defined(__F16C__)
#define PPD_HAS_AVX2

struct Avx2 : Vectors<8> {
  static constexpr int MOST_TOKENS = 4;

  // Products of bytes are summed up in 16 bits as long as these hold them.
  template <int LARGEST, int COUNT>
  struct Sum {
    static constexpr bool HAS_SIGNS = LARGEST > 127;
    static constexpr int FITS = 32767 / (2 * (HAS_SIGNS ? 128 : LARGEST) * 127);
    Whole whole = {};
    Pairs pairs = {};

    PPD_INLINE void add(int number, Bytes codes, int32_t four) {
      __m256i q = __m256i(codes), a = _mm256_set1_epi32(four);
      if constexpr (HAS_SIGNS) a = _mm256_sign_epi8(a, q), q = _mm256_abs_epi8(q);  // -128 stays 128 without a sign
      pairs += Pairs(_mm256_maddubs_epi16(q, a));
      if ((number + 1) % FITS == 0 || number + 1 == COUNT) {
        whole += Whole(_mm256_madd_epi16(__m256i(pairs), _mm256_set1_epi16(1)));
        pairs = Pairs{};
      }
    }
  };

  static PPD_INLINE Bytes table(const uint8_t* at) {
    return Bytes(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
  static PPD_INLINE Bytes looked_up(Bytes table, Bytes codes) {
    return Bytes(_mm256_shuffle_epi8(__m256i(table), __m256i(codes)));
  }
  static PPD_INLINE Whole from_bytes(const uint8_t* at) {
    return Whole(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  }
  static PPD_INLINE Floats to_floats(Whole whole) { return Floats(_mm256_cvtepi32_ps(__m256i(whole))); }
  static PPD_INLINE Floats from_halves(const uint8_t* at) {
    return Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  }
};
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define PPD_HAS_NEON

struct Neon : Vectors<4> {
  static constexpr int MOST_TOKENS = 4;

  template <int LARGEST, int COUNT>
  struct Sum {
    static constexpr bool HAS_SIGNS = LARGEST > 127;
    Whole whole = {};

    PPD_INLINE void add(int, Bytes codes, int32_t four) {
      const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(four));
      whole = Whole(vdotq_s32(int32x4_t(whole), vreinterpretq_s8_u8(uint8x16_t(codes)), a));
    }
  };

  static PPD_INLINE Bytes table(const uint8_t* at) { return load(at); }
  static PPD_INLINE Bytes looked_up(Bytes table, Bytes codes) { return Bytes(vqtbl1q_u8(table, codes)); }
  static PPD_INLINE Whole from_bytes(const uint8_t* at) {
    uint32_t four;
    std::memcpy(&four, at, sizeof four);
    return Whole(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
  }
  static PPD_INLINE Floats to_floats(Whole whole) { return Floats(vcvtq_f32_s32(int32x4_t(whole))); }
  static PPD_INLINE Floats from_halves(const uint8_t* at) {
    float16x4_t halves;
    std::memcpy(&halves, at, sizeof halves);
    return Floats(vcvt_f32_f16(halves));
  }
};
#endif

}  // namespace
