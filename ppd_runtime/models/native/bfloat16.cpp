// Products of a few tokens' states with a weight matrix in bfloat16: the weights are read from first to last, once.
//
// Rows stand in tiles of TILE, the last of what is left. Of a tile first come two columns, a row's two numbers side by
// side, then the next two columns; an odd last column stands alone. So two neighbours are the halves of one 32-bit number,
// which become floats by a shift and a mask, a register holds numbers of several rows, and no sum runs across a register.
//
// An output is the sum of SUMS sums, each over every SUMSth column in their order. So the bits of a token's product depend
// neither on the tokens beside it, nor on the tile in which a row stands, nor on the width of this CPU's registers.

#include "tiled_products.h"
#include "vectors.h"

namespace {

constexpr int SUMS = 4;
constexpr int VECS = TILE / WIDTH;                 // that hold numbers of all rows of a tile
constexpr int MOST_AT_ONCE = WIDTH == 16 ? 6 : 3;  // tokens: their sums stay in registers
constexpr int64_t COLUMNS_AT_ONCE = 512;           // that stay in the first-level cache for the next tokens

inline float value(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// The last tile, of fewer rows, number by number.
void tile_plain(const Products& products, const Tile& tile) {
  const int64_t inputs = products.inputs, paired = inputs - inputs % 2;
  const uint16_t* numbers = reinterpret_cast<const uint16_t*>(tile.at);
  for (int64_t token = 0; token < products.tokens; ++token)
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* states = products.states + token * inputs;
      float sums[SUMS] = {};
      for (int64_t i = 0; i < inputs; ++i) {
        const int64_t place = i < paired ? (i / 2 * tile.rows + r) * 2 + i % 2 : i * tile.rows + r;
        sums[i % SUMS] = added(value(numbers[place]), states[i], sums[i % SUMS]);
      }
      tile.result[token * products.between + r] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

// The sums of some tokens and of the rows in SOME vectors.
template <int TOKENS, int SOME>
struct Sums {
  Vec of[SUMS][SOME][TOKENS];

  // Columns COLUMN and COLUMN + 1 of each SUMS: their numbers are at `pair`, the first token's states of both at `states`.
  template <int COLUMN>
  inline void add_pair(const uint16_t* pair, const float* states, int64_t inputs) {
#pragma GCC unroll 8
    for (int v = 0; v < SOME; ++v) {
      Words both;
      std::memcpy(&both, pair + v * 2 * WIDTH, sizeof both);
      const Vec first = reinterpret_cast<Vec>(both << 16), second = reinterpret_cast<Vec>(both & 0xffff0000u);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t)
        of[COLUMN][v][t] = added(first, spread(states[t * inputs]), of[COLUMN][v][t]);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t)
        of[COLUMN + 1][v][t] = added(second, spread(states[t * inputs + 1]), of[COLUMN + 1][v][t]);
    }
  }

  inline void add_column(int sum, const uint16_t* column, const float* states, int64_t inputs) {
    for (int v = 0; v < SOME; ++v) {
      Vec numbers;
      for (int lane = 0; lane < WIDTH; ++lane) numbers[lane] = value(column[v * WIDTH + lane]);
      for (int t = 0; t < TOKENS; ++t) of[sum][v][t] = added(numbers, spread(states[t * inputs]), of[sum][v][t]);
    }
  }

  // From a multiple of SUMS on; `tile` and `states` are at the first column of all.
  inline void add_columns(const uint16_t* tile, const float* states, int64_t inputs, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + SUMS <= end; i += SUMS) {
      const uint16_t* at = tile + i * TILE;
      if constexpr (TOKENS > 1 || IS_TOLD) fetch_ahead<SUMS * TILE * 2>(at);
      add_pair<0>(at, states + i, inputs);
      add_pair<2>(at + 2 * TILE, states + i + 2, inputs);
    }
    if (i + 2 <= end) {
      add_pair<0>(tile + i * TILE, states + i, inputs);
      i += 2;
    }
    if (i < end) add_column(int(i % SUMS), tile + i * TILE, states + i, inputs);
  }

  inline void finish(float* result, int64_t between) const {
    for (int v = 0; v < SOME; ++v)
      for (int t = 0; t < TOKENS; ++t)
        store((of[0][v][t] + of[1][v][t]) + (of[2][v][t] + of[3][v][t]), result + t * between + v * WIDTH);
  }
};

// Some of a tile's columns for some tokens, whose sums wait in `memory` between two such calls.
template <int TOKENS>
void add_some(const Products& products, const Tile& tile, int64_t token, int64_t begin, int64_t end, float* memory) {
  constexpr int SOME = TOKENS == 1 && VECS > 1 ? 2 : 1;  // one token's sums alone would wait for each other
  const int64_t inputs = products.inputs;
  const uint16_t* numbers = reinterpret_cast<const uint16_t*>(tile.at);
  for (int v = 0; v < VECS; v += SOME) {
    Sums<TOKENS, SOME> sums = {};
    float* const waiting = memory + (token * VECS + v * TOKENS) * SUMS * WIDTH;
    if (begin) std::memcpy(&sums, waiting, sizeof sums);
    sums.add_columns(numbers + v * 2 * WIDTH, products.states + token * inputs, inputs, begin, end);
    if (end < inputs)
      std::memcpy(waiting, &sums, sizeof sums);
    else
      sums.finish(tile.result + token * products.between + v * WIDTH, products.between);
  }
}

typedef void (*AddSome)(const Products&, const Tile&, int64_t, int64_t, int64_t, float*);

void some_tiles(int64_t number, int64_t last, void* context) {
  static constexpr AddSome BY_TOKENS[] = {add_some<1>, add_some<2>, add_some<3>, add_some<4>, add_some<5>, add_some<6>};
  static thread_local Room room;
  const Products& products = *static_cast<const Products*>(context);
  const int64_t inputs = products.inputs, tokens = products.tokens;
  const int64_t groups = (tokens + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
  const int64_t columns = groups > 1 ? COLUMNS_AT_ONCE : inputs;
  float* memory = groups > 1 ? room.of(tokens * SUMS * TILE) : nullptr;
  each_tile(products, number, last, [&](const Tile& tile) {
    if (tile.rows < TILE) return tile_plain(products, tile);
    for (int64_t begin = 0; begin < inputs; begin += columns)
      for (int64_t group = 0, token = 0; group < groups; ++group) {
        const int64_t some = tokens / groups + (group < tokens % groups);
        BY_TOKENS[some - 1](products, tile, token, begin, std::min(inputs, begin + columns), memory);
        token += some;
      }
  });
}

}  // namespace

void ppd_bfloat16_products(const Products& products) {
  for_all_tiles(products, some_tiles, const_cast<Products*>(&products));
}
