// What `products.cpp` calls of `bfloat16.cpp` and `quantised.cpp`: products of the same states with one or several matrices
// whose rows stand in tiles. Each file says how its matrices lie.

#pragma once

#include <algorithm>
#include <cstdint>

#include "tensors.h"

struct Matrix {
  const void* at;
  int64_t outputs;
  int64_t row_bytes;
  int format = 0;  // of a packed one: see quantised.cpp
};

// Matrices of a kind, which take the same states, and where their products go.
struct Products {
  const Matrix* matrices;
  int count;
  const float* states;  // [tokens, inputs]
  float* result;        // of the first token, the outputs of one matrix behind those of the other
  int64_t inputs, tokens;
  int64_t between;      // the results of a token and those of the next one
};

void ppd_bfloat16_products(const Products& products);

// What so many bytes hold, if they are a packed matrix with these inputs; else null.
Matrix ppd_packed_matrix(const void* at, int64_t num_bytes, int64_t inputs);

// Of packed matrices, each in its own format.
void ppd_quantised_products(const Products& products);

namespace {

// Rows that stand together in memory.
struct Tile {
  const uint8_t* at;
  int64_t rows;
  float* result;  // of the first token
  int format;     // its matrix'
};

constexpr int64_t TILE = 16;

// Whether this CPU reads one stream of weights faster where it is told which lines come next. AMD's Zen follows a stream by
// itself, and being told costs it time.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool IS_TOLD = false;
#else
constexpr bool IS_TOLD = true;
#endif

// Have the lines come to the caches that hold these bytes AHEAD of here.
template <int64_t BYTES>
inline void fetch_ahead(const void* here) {
  constexpr int64_t AHEAD = 8192, LINE = 64;
  constexpr int CACHE = IS_TOLD ? 3 : 2;  // of all levels, or from the second on
#pragma GCC unroll 16
  for (int64_t line = 0; line < BYTES; line += LINE)
    __builtin_prefetch(static_cast<const char*>(here) + AHEAD + line, 0, CACHE);
}

inline int64_t tiles_of(int64_t outputs) { return (outputs + TILE - 1) / TILE; }

// Tiles `number` to `last` of all matrices, one after the other.
template <typename Do>
inline void each_tile(const Products& products, int64_t number, int64_t last, Do&& run) {
  float* result = products.result;
  for (int m = 0; m < products.count; ++m) {
    const Matrix& matrix = products.matrices[m];
    const int64_t tiles = tiles_of(matrix.outputs);
    for (int64_t tile = std::max<int64_t>(number, 0); tile < std::min(last, tiles); ++tile) {
      const int64_t row = tile * TILE, rows = std::min(TILE, matrix.outputs - row);
      run(Tile{static_cast<const uint8_t*>(matrix.at) + row * matrix.row_bytes, rows, result + row, matrix.format});
    }
    number -= tiles, last -= tiles, result += matrix.outputs;
  }
}

// Have all tiles run, with PyTorch's threads where they have so much to read that waking them pays, or to compute.
inline void for_all_tiles(const Products& products, void (*some)(int64_t, int64_t, void*), void* context) {
  constexpr int64_t GRAIN = 1 << 19;  // bytes of weights, which a core reads in 6 to 20 microseconds
  const int64_t times = (products.tokens + 7) / 8;  // for eight tokens computing takes about as long as reading
  int64_t tiles = 0, bytes = 0;
  for (const Matrix* matrix = products.matrices; matrix < products.matrices + products.count; ++matrix)
    tiles += tiles_of(matrix->outputs), bytes += times * matrix->outputs * matrix->row_bytes;
  for_all(tiles, std::max<int64_t>(1, GRAIN * tiles / std::max<int64_t>(1, bytes)), some, context);
}

}  // namespace
