// The products of `quantised.h` for whole tiles: one way for all formats, over the vectors of an instruction set.

#pragma once

#include <algorithm>
#include <utility>

#include "quantised_lanes.h"

namespace {

// Chunk `c` of a plane of B bits, its lowest bit moved to bit TO.
template <class V, int B, int TO>
PPD_INLINE typename V::Bytes bits_of(const uint8_t* plane, int c) {
  using Bytes = typename V::Bytes;
  using Pairs = typename V::Pairs;  // bits of one byte come into the other, and are masked
  const Bytes line = V::load(plane + c % B * TILE * CHUNK);
  if constexpr (B == 8) return line;
  const int shift = c / B * B - TO;
  return Bytes(shift < 0 ? Pairs(line) << -shift : Pairs(line) >> shift) & uint8_t(((1 << B) - 1) << TO);
}

// The sums of products of whole numbers of one group of as many rows as a vector has, for each token.
template <class V, const Format& F, int TOKENS>
PPD_INLINE void whole_of_group(
    const uint8_t* parts, const uint8_t* codes, const Rounded& states, int64_t place, typename V::Bytes table,
    typename V::Whole (&found)[TOKENS]) {
  constexpr int HALVES = F.halves ? F.halves : 1, COUNT = CHUNKS / HALVES;
  typename V::template Sum<F.largest, COUNT> sums[HALVES][TOKENS];
#pragma GCC unroll 8
  for (int c = 0; c < CHUNKS; ++c) {
    typename V::Bytes q = bits_of<V, F.low, 0>(codes, c);
    if constexpr (F.high > 0) q |= bits_of<V, F.high, F.low>(codes + F.low * TILE * CHUNK, c);
    if constexpr (F.table != nullptr) q = V::looked_up(table, q);
    if constexpr (sums[0][0].HAS_SIGNS) q -= uint8_t(F.offset);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
      int32_t four;
      std::memcpy(&four, states.values + (place + t * states.groups) * GROUP + c * CHUNK, sizeof four);
      sums[c / COUNT][t].add(c % COUNT, q, four);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t) {
    const int64_t at = place + t * states.groups;
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      typename V::Whole whole = sums[h][t].whole;
      if constexpr (F.offset > 0 && !sums[0][0].HAS_SIGNS)
        whole -= F.offset * (HALVES == 2 ? states.half_sums[2 * at + h] : states.sums[at]);
      if constexpr (F.halves > 0)
        whole *= F.shares_bytes ? V::from_bytes(parts + h * TILE) & 15 : V::from_bytes(parts + h * TILE) << 24 >> 24;
      found[t] = h ? found[t] + whole : whole;
    }
  }
}

// A block's scales and minimums, of as many rows as a vector has.
template <class V>
struct Head {
  typename V::Floats scales, minimums;
};

// Add a group's products to each token's outputs.
template <class V, const Format& F, int TOKENS>
PPD_INLINE void add_group(
    const Head<V>& head, const uint8_t* parts, const uint8_t* codes, const Rounded& states, int64_t place,
    typename V::Bytes table, typename V::Floats (&found)[TOKENS]) {
  typename V::Whole whole[TOKENS];
  whole_of_group<V, F, TOKENS>(parts, codes, states, place, table, whole);
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
    found[t] = found[t] + V::to_floats(whole[t]) * (head.scales * states.scales[place + t * states.groups]);
  if constexpr (!F.has_minimum) return;
  constexpr int HALVES = F.halves ? F.halves : 1;
#pragma GCC unroll 2
  for (int h = 0; h < HALVES; ++h) {
    typename V::Floats minimums = head.minimums;
    if constexpr (F.halves > 0)
      minimums *= V::to_floats(
          F.shares_bytes ? V::from_bytes(parts + h * TILE) >> 4 : V::from_bytes(parts + (F.halves + h) * TILE));
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
      const int64_t at = place + t * states.groups;
      found[t] = found[t] - minimums * (HALVES == 2 ? states.half_weighted[2 * at + h] : states.weighted[at]);
    }
  }
}

typedef void (*SomeTokens)(const uint8_t* tile, const Rounded& states, int64_t token, float* result, int64_t outputs);

template <class V, const Format& F, int TOKENS>
void some_tokens(const uint8_t* tile, const Rounded& states, int64_t token, float* result, int64_t outputs) {
  constexpr int VECTORS = TILE / V::ROWS;
  constexpr int64_t OF_BLOCK = F.row_bytes(F.groups) * TILE, OF_GROUP = OF_BLOCK / F.groups;  // bytes
  const typename V::Bytes table = V::table(F.table ? F.table : CURVE);
  typename V::Floats found[VECTORS][TOKENS] = {};
  for (int64_t block = 0; block < states.groups; block += F.groups, tile += OF_BLOCK) {
    Head<V> of_block[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const uint8_t* scales = tile + v * V::ROWS * F.scale_bytes();
      of_block[v].scales = F.exponents ? V::powers_of_two(V::from_bytes(scales)) : V::from_halves(scales);
      if (F.has_minimum) of_block[v].minimums = V::from_halves(tile + TILE * F.scale_bytes() + v * V::ROWS * 2);
    }
    const uint8_t* parts = tile + F.head_bytes() * TILE;
    const uint8_t* codes = parts + F.groups * F.part_bytes() * TILE;
    for (int g = 0; g < F.groups; ++g, parts += F.part_bytes() * TILE, codes += F.code_bytes() * TILE) {
      if constexpr (IS_TOLD) fetch_ahead<OF_GROUP>(tile + g * OF_GROUP);
      const int64_t place = token * states.groups + block + g;
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        add_group<V, F, TOKENS>(
            of_block[v], parts + v * V::ROWS, codes + v * V::ROWS * CHUNK, states, place, table, found[v]);
    }
  }
  for (int t = 0; t < TOKENS; ++t)
    for (int v = 0; v < VECTORS; ++v) std::memcpy(result + t * outputs + v * V::ROWS, &found[v][t], sizeof found[v][t]);
}

template <class V, const Format& F, int... NUMBERS>
inline void tile_by(
    const uint8_t* tile, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs,
    std::integer_sequence<int, NUMBERS...>) {
  static constexpr SomeTokens BY_TOKENS[] = {some_tokens<V, F, NUMBERS + 1>...};
  for (int first = 0; first < tokens; first += V::MOST_TOKENS)
    BY_TOKENS[std::min(V::MOST_TOKENS, tokens - first) - 1](
        tile, states, token + first, result + first * outputs, outputs);
}

// A whole tile by the code for so many tokens, whose sums stay in registers; the last tile, which may be smaller, by the
// plain one.
template <class V, const Format& F>
void tile_in_vectors(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  if (rows != TILE) return tile_plain<F>(tile, rows, states, token, tokens, result, outputs);
  tile_by<V, F>(tile, states, token, tokens, result, outputs, std::make_integer_sequence<int, V::MOST_TOKENS>());
}

}  // namespace
