// Products of a few tokens' states with a weight matrix of whole numbers in groups, each group with a scale.
//
// A group is GROUP neighbouring inputs. Of a matrix it holds whole numbers q of 8 or 4 bits and a scale d in half
// precision; a weight is d * q. A token's states are made whole numbers a of 8 bits by the same groups, with a scale s in
// float32. An output is the sum of (sum of q * a) * (d * s) over the groups in their order: the inner sum is one of whole
// numbers, exact in any order, and the outer one is made of a multiplication, a multiplication and an addition a group, none
// of them joined. So the bits of a token's product are the same in every form below, on every CPU, for any number of tokens
// and threads.
//
// Rows stand in tiles of TILE, the last of what is left: of each group first the numbers, four inputs of each row side by
// side, then the scales, a row's beside the next one's. So a matrix is read from first to last. With 4 bits a byte holds
// q + 8 of an input, in the low half, and of the input that is half a group further on, in the high half.

#pragma once

#include <cstring>

#include "tiled_products.h"

namespace {

constexpr int GROUP = 32;
constexpr int CHUNK = 4;                // inputs of a row that stand side by side
constexpr int CHUNKS = GROUP / CHUNK;   // of a group
constexpr int SCALE_BYTES = 2;
constexpr int MOST_AT_ONCE = 8;         // tokens

// Bytes of a row's group: numbers and scale.
constexpr int64_t group_bytes(int bits) { return GROUP * bits / 8 + SCALE_BYTES; }

// States of some tokens as whole numbers.
struct Rounded {
  const int8_t* values;  // [tokens, groups * GROUP]
  const float* scales;   // [tokens, groups]
  const int32_t* sums;   // [tokens, groups], of the values
  int64_t groups;
};

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  float number;
  if (exponent == 0) {
    number = float(fraction) * 5.9604644775390625e-8f;  // 2 ** -24
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    bits |= sign;
    std::memcpy(&number, &bits, sizeof bits);
    return number;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  std::memcpy(&number, &bits, sizeof bits);
  return number;
}

// The products of TOKENS tokens, from `token` on, with a tile of `rows` rows; `result` holds a token's outputs every
// `outputs`.
typedef void (*TileProduct)(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs);

template <int BITS>
void tile_plain(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  const int64_t groups = states.groups, bytes = group_bytes(BITS) * rows, of_scales = SCALE_BYTES * rows;
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < rows; ++r) {
      float sum = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* numbers = tile + g * bytes;
        const int8_t* values = states.values + ((token + t) * groups + g) * GROUP;
        int32_t whole = 0;
        for (int i = 0; i < GROUP; ++i) {
          const int chunk = i / CHUNK;
          if constexpr (BITS == 8) {
            whole += int32_t(int8_t(numbers[(chunk * rows + r) * CHUNK + i % CHUNK])) * values[i];
          } else {
            const uint8_t both = numbers[(chunk % (CHUNKS / 2) * rows + r) * CHUNK + i % CHUNK];
            whole += ((chunk < CHUNKS / 2 ? both & 15 : both >> 4) - 8) * values[i];
          }
        }
        uint16_t half;
        std::memcpy(&half, numbers + bytes - of_scales + r * SCALE_BYTES, sizeof half);
        const float scale = half_to_float(half) * states.scales[(token + t) * groups + g];
        sum = sum + float(whole) * scale;
      }
      result[t * outputs + r] = sum;
    }
}

}  // namespace
