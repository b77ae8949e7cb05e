// Products of a few tokens' states with a weight matrix of whole numbers in groups, each group with a scale.
//
// A group is GROUP neighbouring inputs, a block is one group or eight. A code of a few bits stands for a whole number q: the
// code less `offset`, or what a table has for it, less `offset`. A block has a scale d, and perhaps a minimum m. In some formats
// a group, or each half of it, has whole numbers p by which d is multiplied, and k for m. A weight is d * p * q - m * k.
// `formats.py` has the same formats.
//
// A token's states are made whole numbers a of 8 bits by the same groups, with a scale s in float32. An output is the sum over
// the groups, in their order, of
//     (sum over halves of p * (sum of q * a)) * (d * s), less, for each half, (m * k) * (s * (sum of a)).
// The sums of whole numbers are exact in any order. All else is made of single multiplications, additions and subtractions,
// none of them joined. So the bits of a token's product are the same in every form below, on every CPU, for any number of
// tokens and threads.
//
// A packed matrix begins with a `Tag`. Rows stand in tiles of TILE, the last of what is left. A tile has one block behind the
// other, so that it is read from first to last: a block's scales and minimums, then the whole numbers for them of its groups,
// then the codes of its groups. A row's stand beside the next one's. Codes lie in planes, of their lowest bits and perhaps of their highest ones. In a plane of B bits a line holds four inputs of
// each row side by side, and 8 / B such chunks above each other: chunk c is in line c % B, from bit c / B * B on.

#pragma once

#include <cstring>
#include <initializer_list>

#include "tiled_products.h"

namespace {

constexpr int GROUP = 32;
constexpr int CHUNK = 4;               // inputs of a row that stand side by side
constexpr int CHUNKS = GROUP / CHUNK;  // of a group
constexpr int MOST_AT_ONCE = 8;        // tokens
constexpr int NUM_CODES = 16;          // that a table has

// What `NumberFormat` in formats.py says, as C++ has it.
struct Format {
  uint32_t number;
  int low, high;         // bits of the planes
  int offset;            // of the codes, or of what the table has for them
  int largest;           // before the offset is taken away
  const uint8_t* table;  // or null
  int groups;            // of a block
  int halves;            // of a group that have p; 0: none has
  bool has_minimum;
  bool shares_bytes;     // p and k are the halves of a byte
  bool exponents;        // a scale is a power of two, in a byte, instead of in half precision

  // Bytes of a row: of a block's scale and minimum, of a group's p and k, and of its codes.
  constexpr int64_t scale_bytes() const { return exponents ? 1 : 2; }
  constexpr int64_t head_bytes() const { return scale_bytes() + (has_minimum ? 2 : 0); }
  constexpr int64_t part_bytes() const { return halves * (has_minimum && !shares_bytes ? 2 : 1); }
  constexpr int64_t code_bytes() const { return GROUP * (low + high) / 8; }
  constexpr int64_t row_bytes(int64_t of_groups) const {
    return of_groups / groups * head_bytes() + of_groups * (part_bytes() + code_bytes());
  }
};

constexpr uint8_t CURVE[NUM_CODES] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4[NUM_CODES] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr Format Q4_0{2, 4, 0, 8, 15, nullptr, 1, 0, false, false, false};
constexpr Format Q4_1{3, 4, 0, 0, 15, nullptr, 1, 0, true, false, false};
constexpr Format Q5_0{6, 4, 1, 16, 31, nullptr, 1, 0, false, false, false};
constexpr Format Q5_1{7, 4, 1, 0, 31, nullptr, 1, 0, true, false, false};
constexpr Format Q8_0{8, 8, 0, 128, 255, nullptr, 1, 0, false, false, false};
constexpr Format Q2_K{10, 2, 0, 0, 3, nullptr, 8, 2, true, true, false};
constexpr Format Q3_K{11, 2, 1, 4, 7, nullptr, 8, 2, false, false, false};
constexpr Format Q4_K{12, 4, 0, 0, 15, nullptr, 8, 1, true, false, false};
constexpr Format Q5_K{13, 4, 1, 0, 31, nullptr, 8, 1, true, false, false};
constexpr Format Q6_K{14, 4, 2, 32, 63, nullptr, 8, 2, false, false, false};
constexpr Format IQ4_NL{20, 4, 0, 128, 241, CURVE, 1, 0, false, false, false};
constexpr Format IQ4_XS{23, 4, 0, 128, 241, CURVE, 8, 1, false, false, false};
constexpr Format MXFP4{39, 4, 0, 16, 28, FP4, 1, 0, false, false, true};

#define PPD_EACH_FORMAT(DO) \
  DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(IQ4_NL) DO(IQ4_XS) DO(MXFP4)

// What a packed matrix begins with; `packing.py` writes it.
struct Tag {
  char magic[4];
  uint32_t layout, number, unused;
  int64_t outputs, inputs;
  char more[32];
};
static_assert(sizeof(Tag) == 64);
constexpr char MAGIC[] = "ppdq";
constexpr uint32_t LAYOUT = 4;
constexpr int64_t WHOLE = 64;  // bytes of which a packed matrix takes a multiple

// States of some tokens as whole numbers.
struct Rounded {
  const int8_t* values;        // [tokens, groups * GROUP]
  const float* scales;         // [tokens, groups]
  const int32_t* sums;         // [tokens, groups], of the values
  const int32_t* half_sums;    // [tokens, groups, 2]
  const float* weighted;       // [tokens, groups]: sums times scales
  const float* half_weighted;  // [tokens, groups, 2]
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

// 2 ** (exponent - 128): the table of whole numbers has twice what they stand for.
inline float power_of_two(uint8_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : uint32_t(exponent - 1) << 23;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// One row of a tile of `rows` rows, number by number.
template <const Format& F>
class Row {
 public:
  Row(const uint8_t* tile, int64_t rows, int64_t row) : tile_(tile), rows_(rows), row_(row) {}

  float scale(int64_t group) const {
    const uint8_t* at = head(group);
    return F.exponents ? power_of_two(at[row_]) : half_to_float(half(at, row_));
  }
  int part(int64_t group, int of_half) const {
    const uint8_t byte = parts(group)[of_half * rows_ + row_];
    return F.shares_bytes ? byte & 15 : int8_t(byte);
  }
  // Of a half, or of the whole group.
  float minimum_of(int64_t group, int of_half) const {
    const float minimum = half_to_float(half(head(group) + F.scale_bytes() * rows_, row_));
    if (!F.halves) return minimum;
    const uint8_t* at = parts(group) + of_half * rows_ + row_;
    return minimum * float(F.shares_bytes ? *at >> 4 : at[F.halves * rows_]);
  }
  int whole(int64_t group, int input) const {
    int code = bits<F.low>(group, 0, input);
    if constexpr (F.high > 0) code |= bits<F.high>(group, F.low, input) << F.low;
    return (F.table ? F.table[code] : code) - F.offset;
  }

 private:
  const uint8_t* tile_;
  int64_t rows_, row_;

  const uint8_t* head(int64_t group) const { return tile_ + group / F.groups * F.row_bytes(F.groups) * rows_; }
  const uint8_t* parts(int64_t group) const {
    return head(group) + (F.head_bytes() + group % F.groups * F.part_bytes()) * rows_;
  }
  const uint8_t* codes(int64_t group) const {
    return head(group) + (F.head_bytes() + F.groups * F.part_bytes() + group % F.groups * F.code_bytes()) * rows_;
  }
  static uint16_t half(const uint8_t* at, int64_t number) {
    uint16_t found;
    std::memcpy(&found, at + number * sizeof found, sizeof found);
    return found;
  }
  template <int B>
  int bits(int64_t group, int lines_before, int input) const {
    const int chunk = input / CHUNK;
    const uint8_t* line = codes(group) + (lines_before + chunk % B) * CHUNK * rows_;
    return line[row_ * CHUNK + input % CHUNK] >> chunk / B * B & ((1 << B) - 1);
  }
};

// The products of `tokens` tokens, from `token` on, with a tile of `rows` rows; `result` holds a token's outputs every
// `outputs`.
typedef void (*TileProduct)(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs);

template <const Format& F>
void tile_plain(
    const uint8_t* tile, int rows, const Rounded& states, int64_t token, int tokens, float* result, int64_t outputs) {
  constexpr int HALVES = F.halves ? F.halves : 1, INPUTS = GROUP / HALVES;
  const int64_t groups = states.groups;
  for (int r = 0; r < rows; ++r) {
    const Row<F> row(tile, rows, r);
    float sums[MOST_AT_ONCE] = {};
    for (int64_t g = 0; g < groups; ++g) {
      int q[GROUP];
      for (int i = 0; i < GROUP; ++i) q[i] = row.whole(g, i);
      for (int t = 0; t < tokens; ++t) {
        const int64_t place = (token + t) * groups + g;
        int32_t whole = 0;
        for (int h = 0; h < HALVES; ++h) {
          int32_t of_half = 0;
          for (int i = h * INPUTS; i < (h + 1) * INPUTS; ++i) of_half += q[i] * states.values[place * GROUP + i];
          whole += F.halves ? row.part(g, h) * of_half : of_half;
        }
        sums[t] = sums[t] + float(whole) * (row.scale(g) * states.scales[place]);
        for (int h = 0; F.has_minimum && h < HALVES; ++h)
          sums[t] = sums[t] - row.minimum_of(g, h) * (HALVES == 2 ? states.half_weighted[2 * place + h] : states.weighted[place]);
      }
    }
    for (int t = 0; t < tokens; ++t) result[t * outputs + r] = sums[t];
  }
}

// One row of a tile in floats.
typedef void (*RowInFloats)(const uint8_t* tile, int64_t rows, int64_t row, int64_t groups, float* result);

template <const Format& F>
void row_in_floats(const uint8_t* tile, int64_t rows, int64_t number, int64_t groups, float* result) {
  constexpr int HALVES = F.halves ? F.halves : 1, INPUTS = GROUP / HALVES;
  const Row<F> row(tile, rows, number);
  for (int64_t g = 0; g < groups; ++g)
    for (int h = 0; h < HALVES; ++h) {
      const float scale = F.halves ? row.scale(g) * float(row.part(g, h)) : row.scale(g);
      const float minimum = F.has_minimum ? row.minimum_of(g, h) : 0;
      for (int i = h * INPUTS; i < (h + 1) * INPUTS; ++i) {
        const float weight = scale * float(row.whole(g, i));
        *result++ = F.has_minimum ? weight - minimum : weight;
      }
    }
}

}  // namespace
