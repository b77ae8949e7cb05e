// Forms of the products of `quantised.h` for instruction sets, which of them this CPU has, and the operator.

#include "quantised.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tiled_products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PPD_FOR(features) __attribute__((target(features)))
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {


#if defined(__x86_64__)

typedef void (*SomeTokens)(
    const uint8_t* tile, const Rounded& states, int64_t token, float* result, int64_t outputs);

// A whole tile by the form for so many tokens, of which there is one for each number up to MOST, whose sums stay in
// registers; the last tile, which may be smaller, by the plain one.
template <int BITS, int MOST>
inline void tile_by(
    const SomeTokens (&by_tokens)[MOST], const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens,
    float* result, int64_t outputs) {
  if (rows != TILE) return tile_plain<BITS>(tile, rows, states, token, tokens, result, outputs);
  for (int first = 0; first < tokens; first += MOST)
    by_tokens[std::min(MOST, tokens - first) - 1](tile, states, token + first, result + first * outputs, outputs);
}

// Sums of one group of eight rows, for each token.
template <int BITS, int TOKENS>
PPD_FOR("avx2,f16c") inline void group_avx2(
    const uint8_t* numbers, const int8_t* values, int64_t between, const int32_t* sums, int64_t sums_between, __m256i* whole) {
  if constexpr (BITS == 8) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int t = 0; t < TOKENS; ++t) whole[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = 0; c < CHUNKS; ++c) {
      const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + c * TILE * CHUNK));
      const __m256i size = _mm256_abs_epi8(q);  // -128 stays 128 without a sign
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) {
        int32_t four;
        std::memcpy(&four, values + t * between + c * CHUNK, sizeof four);
        const __m256i a = _mm256_sign_epi8(_mm256_set1_epi32(four), q);
        // 2 * 128 * 127 fits 16 bits
        whole[t] = _mm256_add_epi32(whole[t], _mm256_madd_epi16(_mm256_maddubs_epi16(size, a), ones));
      }
    }
  } else {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i halves[TOKENS];  // 8 * 2 * 15 * 127 fits 16 bits
    for (int t = 0; t < TOKENS; ++t) halves[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int c = 0; c < CHUNKS / 2; ++c) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + c * TILE * CHUNK));
      const __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) {
        int32_t near, far;
        std::memcpy(&near, values + t * between + c * CHUNK, sizeof near);
        std::memcpy(&far, values + t * between + (c + CHUNKS / 2) * CHUNK, sizeof far);
        halves[t] = _mm256_add_epi16(halves[t], _mm256_maddubs_epi16(first, _mm256_set1_epi32(near)));
        halves[t] = _mm256_add_epi16(halves[t], _mm256_maddubs_epi16(second, _mm256_set1_epi32(far)));
      }
    }
    for (int t = 0; t < TOKENS; ++t)
      whole[t] = _mm256_sub_epi32(
          _mm256_madd_epi16(halves[t], ones), _mm256_set1_epi32(8 * sums[t * sums_between]));
  }
}

template <int BITS, int TOKENS>
PPD_FOR("avx2,f16c") inline void some_avx2(
    const uint8_t* tile, const Rounded& states, int64_t token, float* result, int64_t outputs) {
  constexpr int64_t bytes = group_bytes(BITS) * TILE, before_scales = bytes - SCALE_BYTES * TILE;
  constexpr int LANES = 8;
  const int64_t groups = states.groups, between = groups * GROUP;
  const int8_t* values = states.values + token * between;
  const float* of_states = states.scales + token * groups;
  const int32_t* sums = states.sums + token * groups;
  __m256 found[2][TOKENS];
  for (auto& half : found)
    for (auto& sum : half) sum = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, tile += bytes) {
    if constexpr (IS_TOLD) fetch_ahead<bytes>(tile);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256i whole[TOKENS];
      group_avx2<BITS, TOKENS>(
          tile + half * LANES * CHUNK, values + g * GROUP, between, sums + g, groups, whole);
      const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128(
          reinterpret_cast<const __m128i*>(tile + before_scales + half * LANES * SCALE_BYTES)));
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) {
        const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(of_states[t * groups + g]));
        found[half][t] = _mm256_add_ps(found[half][t], _mm256_mul_ps(_mm256_cvtepi32_ps(whole[t]), scale));
      }
    }
  }
  for (int t = 0; t < TOKENS; ++t)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(result + t * outputs + half * LANES, found[half][t]);
}

template <int BITS>
void tile_avx2(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  static constexpr SomeTokens BY_TOKENS[] = {
      some_avx2<BITS, 1>, some_avx2<BITS, 2>, some_avx2<BITS, 3>, some_avx2<BITS, 4>};
  tile_by<BITS>(BY_TOKENS, tile, rows, states, token, tokens, result, outputs);
}

// The same with sums of products of bytes in one instruction: with 16 rows at a time.
template <int BITS, int TOKENS>
PPD_FOR("avx512f,avx512bw,avx512vl,avx512vnni,f16c") inline void some_vnni(
    const uint8_t* tile, const Rounded& states, int64_t token, float* result, int64_t outputs) {
  constexpr int64_t bytes = group_bytes(BITS) * TILE, before_scales = bytes - SCALE_BYTES * TILE;
  constexpr int LINES = CHUNKS * BITS / 8, SHIFT = BITS == 8 ? 128 : 8;
  const int64_t groups = states.groups, between = groups * GROUP;
  const int8_t* values = states.values + token * between;
  const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80));
  __m512 found[TOKENS];
  for (auto& sum : found) sum = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, tile += bytes) {
    if constexpr (IS_TOLD) fetch_ahead<bytes>(tile);
    __m512i whole[TOKENS];
    for (int t = 0; t < TOKENS; ++t) whole[t] = _mm512_set1_epi32(-SHIFT * states.sums[(token + t) * groups + g]);
#pragma GCC unroll 8
    for (int c = 0; c < LINES; ++c) {
      const __m512i q = _mm512_loadu_si512(tile + c * TILE * CHUNK);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        int32_t near, far;
        std::memcpy(&near, values + t * between + g * GROUP + c * CHUNK, sizeof near);
        if constexpr (BITS == 8) {
          whole[t] = _mm512_dpbusd_epi32(whole[t], _mm512_xor_si512(q, sign), _mm512_set1_epi32(near));
        } else {
          std::memcpy(&far, values + t * between + g * GROUP + (c + CHUNKS / 2) * CHUNK, sizeof far);
          whole[t] = _mm512_dpbusd_epi32(whole[t], _mm512_and_si512(q, low), _mm512_set1_epi32(near));
          whole[t] = _mm512_dpbusd_epi32(
              whole[t], _mm512_and_si512(_mm512_srli_epi16(q, 4), low), _mm512_set1_epi32(far));
        }
      }
    }
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + before_scales)));
    for (int t = 0; t < TOKENS; ++t) {
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(states.scales[(token + t) * groups + g]));
      found[t] = _mm512_add_ps(found[t], _mm512_mul_ps(_mm512_cvtepi32_ps(whole[t]), scale));
    }
  }
  for (int t = 0; t < TOKENS; ++t) _mm512_storeu_ps(result + t * outputs, found[t]);
}

template <int BITS>
void tile_vnni(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  static constexpr SomeTokens BY_TOKENS[] = {
      some_vnni<BITS, 1>, some_vnni<BITS, 2>, some_vnni<BITS, 3>, some_vnni<BITS, 4>,
      some_vnni<BITS, 5>, some_vnni<BITS, 6>, some_vnni<BITS, 7>, some_vnni<BITS, 8>};
  tile_by<BITS>(BY_TOKENS, tile, rows, states, token, tokens, result, outputs);
}

#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

template <int BITS>
void tile_neon(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  if (rows != TILE) return tile_plain<BITS>(tile, rows, states, token, tokens, result, outputs);
  constexpr int64_t bytes = group_bytes(BITS) * TILE, before_scales = bytes - SCALE_BYTES * TILE;
  constexpr int LANES = 4, LINES = CHUNKS * BITS / 8;
  const int64_t groups = states.groups;
  for (int t = 0; t < tokens; ++t) {
    float32x4_t found[TILE / LANES] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const int8_t* values = states.values + ((token + t) * groups + g) * GROUP;
      const float of_states = states.scales[(token + t) * groups + g];
      for (int four = 0; four < TILE / LANES; ++four) {
        int32x4_t whole = vdupq_n_s32(BITS == 8 ? 0 : -8 * states.sums[(token + t) * groups + g]);
        for (int c = 0; c < LINES; ++c) {
          const uint8_t* at = tile + g * bytes + (c * TILE + four * LANES) * CHUNK;
          int32_t near, far;
          std::memcpy(&near, values + c * CHUNK, sizeof near);
          const int8x16_t of_near = vreinterpretq_s8_s32(vdupq_n_s32(near));
          if constexpr (BITS == 8) {
            whole = vdotq_s32(whole, vreinterpretq_s8_u8(vld1q_u8(at)), of_near);
          } else {
            std::memcpy(&far, values + (c + CHUNKS / 2) * CHUNK, sizeof far);
            const uint8x16_t both = vld1q_u8(at);
            whole = vdotq_s32(whole, vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), of_near);
            whole = vdotq_s32(
                whole, vreinterpretq_s8_u8(vshrq_n_u8(both, 4)), vreinterpretq_s8_s32(vdupq_n_s32(far)));
          }
        }
        float16x4_t d;
        std::memcpy(&d, tile + g * bytes + before_scales + four * LANES * SCALE_BYTES, sizeof d);
        const float32x4_t scale = vmulq_f32(vcvt_f32_f16(d), vdupq_n_f32(of_states));
        found[four] = vaddq_f32(found[four], vmulq_f32(vcvtq_f32_s32(whole), scale));
      }
    }
    for (int four = 0; four < TILE / LANES; ++four) vst1q_f32(result + t * outputs + four * LANES, found[four]);
  }
}

#endif

struct Form {
  const char* name;
  bool here;
  TileProduct with_8_bits, with_4_bits;
};

// The slowest first.
const std::vector<Form>& forms() {
  static const std::vector<Form> all = {
      {"plain", true, tile_plain<8>, tile_plain<4>},
#if defined(__x86_64__)
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), tile_avx2<8>, tile_avx2<4>},
      {"avx512vnni",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni"),
       tile_vnni<8>, tile_vnni<4>},
#elif defined(__aarch64__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
      {"neon", true, tile_neon<8>, tile_neon<4>},
#endif
  };
  return all;
}

const Form* fastest() {
  const Form* found = nullptr;
  for (const Form& form : forms())
    if (form.here) found = &form;
  return found;
}

const Form* chosen = fastest();

// What a thread needs for the states of a product; it grows and stays.
struct Memory {
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

// One token's group.
inline void round_group(const float* from, int8_t* values, float* scale, int32_t* sum) {
  uint32_t most = 0;
  for (int i = 0; i < GROUP; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffffu);
  }
  constexpr uint32_t TOO_SMALL = 0x0d800000u, INFINITE = 0x7f800000u;  // 2 ** -100
  *sum = 0;
  if (most < TOO_SMALL || most >= INFINITE) {
    std::memset(values, 0, GROUP);
    *scale = most < TOO_SMALL ? 0.0f : __builtin_nanf("");
    return;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const float inverse = 127.0f / largest;
  *scale = largest / 127.0f;
  int32_t total = 0;
  for (int i = 0; i < GROUP; ++i) {
    // adding and subtracting 1.5 * 2 ** 23 rounds to the nearest whole number, of two to the even one
    const int32_t value = int32_t((from[i] * inverse + 12582912.0f) - 12582912.0f);
    values[i] = int8_t(value);
    total += value;
  }
  *sum = total;
}

Rounded rounded(const float* states, int64_t tokens, int64_t inputs, Memory& memory) {
  const int64_t groups = inputs / GROUP;
  if (static_cast<int64_t>(memory.values.size()) < tokens * inputs) {
    memory.values.resize(tokens * inputs);
    memory.scales.resize(tokens * groups);
    memory.sums.resize(tokens * groups);
  }
  for (int64_t group = 0; group < tokens * groups; ++group)
    round_group(
        states + group * GROUP, memory.values.data() + group * GROUP, &memory.scales[group], &memory.sums[group]);
  return {memory.values.data(), memory.scales.data(), memory.sums.data(), groups};
}

struct Context {
  const Products& products;
  Rounded states;
  TileProduct run;
  int64_t row_bytes;
};

void some_tiles(int64_t number, int64_t last, void* context) {
  const Context& of = *static_cast<const Context*>(context);
  each_tile(of.products, of.row_bytes, number, last, [&](const Tile& tile) {
    for (int64_t token = 0; token < of.products.tokens; token += MOST_AT_ONCE) {
      const int tokens = int(std::min<int64_t>(MOST_AT_ONCE, of.products.tokens - token));
      float* const at = tile.result + token * of.products.between;
      of.run(tile.at, int(tile.rows), of.states, token, tokens, at, of.products.between);
    }
  });
}

}  // namespace

int ppd_bits_of_quantised(int64_t inputs, int64_t row_bytes) {
  for (int bits : {8, 4})
    if (inputs > 0 && inputs % GROUP == 0 && row_bytes == inputs / GROUP * group_bytes(bits)) return bits;
  return 0;
}

void ppd_quantised_products(const Products& products, int bits) {
  static thread_local Memory memory;
  const int64_t inputs = products.inputs;
  Context context{
      products, rounded(products.states, products.tokens, inputs, memory),
      bits == 8 ? chosen->with_8_bits : chosen->with_4_bits, inputs / GROUP * group_bytes(bits)};
  for_all_tiles(products, context.row_bytes, some_tiles, &context);
}

// The names of the forms that run here, the fastest last, with a comma between them.
extern "C" const char* ppd_quantised_forms() {
  static const std::string names = [] {
    std::string found;
    for (const Form& form : forms())
      if (form.here) found += (found.empty() ? "" : ",") + std::string(form.name);
    return found;
  }();
  return names.c_str();
}

// Have products made in a form from now on; 0 where it does not run here.
extern "C" int ppd_choose_quantised_form(const char* name) {
  for (const Form& form : forms())
    if (form.here && name == std::string(form.name)) {
      chosen = &form;
      return 1;
    }
  return 0;
}
