// Products with packed matrices: the forms of them that this CPU has, states as whole numbers, and rows in floats.

#include <string>
#include <vector>

#include "packed.h"
#include "quantised_products.h"

namespace {

#define PPD_FORMAT(F) F,
#define PPD_ROW(F) row_in_floats<F>,
#define PPD_PLAIN(F) tile_plain<F>,
#define PPD_AVX2(F) tile_in_vectors<Avx2, F>,
#define PPD_VNNI(F) tile_in_vectors<Avx512Vnni, F>,
#define PPD_NEON(F) tile_in_vectors<Neon, F>,

constexpr Format FORMATS[] = {PPD_EACH_FORMAT(PPD_FORMAT)};
constexpr RowInFloats IN_FLOATS[] = {PPD_EACH_FORMAT(PPD_ROW)};
constexpr int NUM_FORMATS = sizeof FORMATS / sizeof *FORMATS;

struct Form {
  const char* name;
  TileProduct of_formats[NUM_FORMATS];
};

// The slowest first. The code is built for this very CPU, so that all of them run here.
constexpr Form FORMS[] = {
    {"plain", {PPD_EACH_FORMAT(PPD_PLAIN)}},
#if defined(PPD_HAS_AVX2)
    {"avx2", {PPD_EACH_FORMAT(PPD_AVX2)}},
#endif
#if defined(PPD_HAS_AVX512VNNI)
    {"avx512vnni", {PPD_EACH_FORMAT(PPD_VNNI)}},
#endif
#if defined(PPD_HAS_NEON)
    {"neon", {PPD_EACH_FORMAT(PPD_NEON)}},
#endif
};

const Form* chosen = std::end(FORMS) - 1;

// What a thread needs for the states of a product; it grows and stays.
struct Memory {
  std::vector<int8_t> values;
  std::vector<float> scales, weighted;
  std::vector<int32_t> sums;
};

// One token's group; `sums` are of its halves and of the whole.
inline void round_group(const float* from, int8_t* values, float* scale, int32_t* sums) {
  uint32_t most = 0;
  for (int i = 0; i < GROUP; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffffu);
  }
  constexpr uint32_t TOO_SMALL = 0x0d800000u, INFINITE = 0x7f800000u;  // 2 ** -100
  sums[0] = sums[1] = sums[2] = 0;
  if (most < TOO_SMALL || most >= INFINITE) {
    std::memset(values, 0, GROUP);
    *scale = most < TOO_SMALL ? 0.0f : __builtin_nanf("");
    return;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const float inverse = 127.0f / largest;
  *scale = largest / 127.0f;
  for (int half = 0; half < 2; ++half) {
    int32_t total = 0;
    for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; ++i) {
      // adding and subtracting 1.5 * 2 ** 23 rounds to the nearest whole number, of two to the even one
      const int32_t value = int32_t((from[i] * inverse + 12582912.0f) - 12582912.0f);
      values[i] = int8_t(value);
      total += value;
    }
    sums[half] = total;
  }
  sums[2] = sums[0] + sums[1];
}

Rounded rounded(const float* states, int64_t tokens, int64_t inputs, Memory& memory) {
  const int64_t groups = inputs / GROUP, all = tokens * groups;
  if (static_cast<int64_t>(memory.values.size()) < tokens * inputs) {
    memory.values.resize(tokens * inputs);
    memory.scales.resize(all), memory.weighted.resize(3 * all), memory.sums.resize(3 * all);
  }
  int32_t *const half_sums = memory.sums.data(), *const sums = half_sums + 2 * all;
  float *const half_weighted = memory.weighted.data(), *const weighted = half_weighted + 2 * all;
  for (int64_t group = 0; group < all; ++group) {
    int32_t found[3];
    float& scale = memory.scales[group];
    round_group(states + group * GROUP, memory.values.data() + group * GROUP, &scale, found);
    for (int half = 0; half < 2; ++half)
      half_sums[2 * group + half] = found[half], half_weighted[2 * group + half] = scale * float(found[half]);
    sums[group] = found[2], weighted[group] = scale * float(found[2]);
  }
  return {memory.values.data(), memory.scales.data(), sums, half_sums, weighted, half_weighted, groups};
}

struct Context {
  const Products& products;
  Rounded states;
};

void some_tiles(int64_t number, int64_t last, void* context) {
  const Context& of = *static_cast<const Context*>(context);
  each_tile(of.products, number, last, [&](const Tile& tile) {
    for (int64_t token = 0; token < of.products.tokens; token += MOST_AT_ONCE) {
      const int tokens = int(std::min<int64_t>(MOST_AT_ONCE, of.products.tokens - token));
      float* const at = tile.result + token * of.products.between;
      chosen->of_formats[tile.format](tile.at, int(tile.rows), of.states, token, tokens, at, of.products.between);
    }
  });
}

}  // namespace

Matrix ppd_packed_matrix(const void* at, int64_t num_bytes, int64_t inputs) {
  constexpr Matrix NONE{nullptr, 0, 0};
  Tag tag;
  if (num_bytes < static_cast<int64_t>(sizeof tag)) return NONE;
  std::memcpy(&tag, at, sizeof tag);
  if (std::memcmp(tag.magic, MAGIC, sizeof tag.magic) || tag.layout != LAYOUT || tag.inputs != inputs) return NONE;
  for (int format = 0; format < NUM_FORMATS; ++format) {
    if (FORMATS[format].number != tag.number) continue;
    const int64_t row_bytes = FORMATS[format].row_bytes(inputs / GROUP);
    if (inputs <= 0 || inputs % (FORMATS[format].groups * GROUP) || tag.outputs <= 0) return NONE;
    if (tag.outputs > num_bytes / row_bytes) return NONE;
    if (num_bytes != int64_t(sizeof tag) + (tag.outputs * row_bytes + WHOLE - 1) / WHOLE * WHOLE) return NONE;
    return {static_cast<const uint8_t*>(at) + sizeof tag, tag.outputs, row_bytes, format};
  }
  return NONE;
}

void ppd_quantised_products(const Products& products) {
  static thread_local Memory memory;
  Context context{products, rounded(products.states, products.tokens, products.inputs, memory)};
  for_all_tiles(products, some_tiles, &context);
}

extern "C" int ppd_rows_in_floats(
    const void* packed, int64_t num_bytes, int64_t inputs, const int64_t* rows, int64_t count, float* result) {
  const Matrix matrix = ppd_packed_matrix(packed, num_bytes, inputs);
  if (!matrix.at) return 0;
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= matrix.outputs) return 0;
    const int64_t first = rows[i] / TILE * TILE;
    const uint8_t* tile = static_cast<const uint8_t*>(matrix.at) + first * matrix.row_bytes;
    const int64_t of_tile = std::min(TILE, matrix.outputs - first);
    IN_FLOATS[matrix.format](tile, of_tile, rows[i] - first, inputs / GROUP, result + i * inputs);
  }
  return 1;
}

// The names of the forms that run here, the fastest last, with a comma between them.
extern "C" const char* ppd_quantised_forms() {
  static const std::string names = [] {
    std::string found;
    for (const Form& form : FORMS) found += (found.empty() ? "" : ",") + std::string(form.name);
    return found;
  }();
  return names.c_str();
}

// Have products made in a form from now on; 0 where it does not run here.
extern "C" int ppd_choose_quantised_form(const char* name) {
  for (const Form& form : FORMS)
    if (name == std::string(form.name)) {
      chosen = &form;
      return 1;
    }
  return 0;
}
