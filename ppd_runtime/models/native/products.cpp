// Products of a few tokens' states with a weight matrix: each weight is read once, whatever the number of tokens.
//
// One sum for each token and row, in an order that only the number of columns and the weights' dtype decide: the bits of a
// token's product depend neither on the tokens beside it nor on how rows are shared out. Weights are read a few blocks
// ahead, since a core that waits for each line reaches half of the memory's speed.
//
// Two neighbours in bfloat16 are the halves of one 32-bit number, and become floats by a shift and a mask. So these weights
// come as even and odd columns, and the states are put in that order before.

#include <algorithm>
#include <type_traits>

#include "quantised_product.h"
#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int ROWS = 4;             // of the weights, at a time
constexpr int MOST_TOKENS = 6;      // at a time: ROWS * MOST_TOKENS sums stay in registers
constexpr int AHEAD = 4;            // blocks of ROWS that are fetched before they are needed
constexpr int COLUMNS = 2 * WIDTH;  // at a time
constexpr int64_t GRAIN = 1 << 16;  // weights, for which a thread of its own pays

struct BFloat16 {
  uint16_t bits;
};

inline float value(float weight) { return weight; }

inline float value(BFloat16 weight) {
  const uint32_t bits = uint32_t(weight.bits) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// The first or the second half of COLUMNS weights, as the states are in order.
template <int HALF>
inline Vec load_half(const float* from) {
  return load(from + HALF * WIDTH);
}

template <int HALF>
inline Vec load_half(const BFloat16* from) {
  Words pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return reinterpret_cast<Vec>(HALF == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

template <int HALF, int NUM_ROWS, int NUM_TOKENS, typename Weight>
inline void add_half(const Weight* weight, const float* states, int64_t inputs, Vec (*sums)[NUM_TOKENS]) {
  Vec rows[NUM_ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < NUM_ROWS; ++r) rows[r] = load_half<HALF>(weight + r * inputs);
#pragma GCC unroll 8
  for (int t = 0; t < NUM_TOKENS; ++t) {
    const Vec state = load(states + t * inputs + HALF * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r) sums[r][t] = added(rows[r], state, sums[r][t]);
  }
}

struct Product {
  const void* weight;  // [outputs, inputs]
  const float* states;  // [tokens, inputs], in the order of the weights' columns
  float* result;  // [tokens, outputs]
  int64_t inputs, outputs, tokens;
};

// What is in the vectors of each row and token from DONE on, summed up: as many tokens at a time as give a vector of sums.
template <int NUM_ROWS, int NUM_TOKENS, int DONE = 0>
inline void sum_up(Vec (*sums)[NUM_TOKENS], float (*found)[NUM_ROWS]) {
  constexpr int LEFT = NUM_TOKENS - DONE, MOST = WIDTH / NUM_ROWS;
  if constexpr (LEFT > 0) {
    constexpr int TOKENS = LEFT >= 4 && MOST >= 4 ? 4 : LEFT >= 2 && MOST >= 2 ? 2 : 1;
    Vec some[TOKENS * NUM_ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; ++r) some[t * NUM_ROWS + r] = sums[r][DONE + t];
    const Vec together = sums_of<TOKENS * NUM_ROWS>(some);
    std::memcpy(found[DONE], &together, sizeof(float) * TOKENS * NUM_ROWS);
    sum_up<NUM_ROWS, NUM_TOKENS, DONE + TOKENS>(sums, found);
  }
}

template <int NUM_ROWS, int NUM_TOKENS, typename Weight>
inline void block(const Product& product, int64_t row, int64_t token) {
  const int64_t inputs = product.inputs, whole = inputs - inputs % COLUMNS;
  const Weight* weight = static_cast<const Weight*>(product.weight) + row * inputs;
  const float* states = product.states + token * inputs;
  Vec sums[NUM_ROWS][NUM_TOKENS] = {};
  for (int64_t i = 0; i < whole; i += COLUMNS) {
    const Weight* again = weight + i;
    __asm__("" : "+r"(again));  // both halves are loaded: to keep one meanwhile takes registers that sums need
    add_half<0, NUM_ROWS, NUM_TOKENS>(weight + i, states + i, inputs, sums);
    add_half<1, NUM_ROWS, NUM_TOKENS>(again, states + i, inputs, sums);
    const int64_t next = AHEAD * NUM_ROWS * inputs + i;
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r)
#pragma GCC unroll 8
      for (size_t line = 0; line < COLUMNS * sizeof(Weight); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(weight + r * inputs + next) + line, 0, 3);
  }
  float found[NUM_TOKENS][NUM_ROWS];
  sum_up<NUM_ROWS, NUM_TOKENS>(sums, found);
  for (int t = 0; t < NUM_TOKENS; ++t) {
    for (int64_t i = whole; i < inputs; ++i)
      for (int r = 0; r < NUM_ROWS; ++r)
        found[t][r] = added(value(weight[r * inputs + i]), states[t * inputs + i], found[t][r]);
    std::memcpy(product.result + (token + t) * product.outputs + row, found[t], sizeof found[t]);
  }
}

template <int NUM_ROWS, typename Weight>
inline void rows_for(const Product& product, int64_t row, int64_t token, int64_t tokens) {
  switch (tokens) {
    case 1: return block<NUM_ROWS, 1, Weight>(product, row, token);
    case 2: return block<NUM_ROWS, 2, Weight>(product, row, token);
    case 3: return block<NUM_ROWS, 3, Weight>(product, row, token);
    case 4: return block<NUM_ROWS, 4, Weight>(product, row, token);
    case 5: return block<NUM_ROWS, 5, Weight>(product, row, token);
    case 6: return block<NUM_ROWS, 6, Weight>(product, row, token);
  }
}

template <int NUM_ROWS, typename Weight>
inline void rows_for_all(const Product& product, int64_t row) {
  const int64_t groups = (product.tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (int64_t group = 0, token = 0; group < groups; ++group) {
    const int64_t tokens = product.tokens / groups + (group < product.tokens % groups);
    rows_for<NUM_ROWS, Weight>(product, row, token, tokens);
    token += tokens;
  }
}

template <typename Weight>
void some_rows(int64_t row, int64_t end, void* context) {
  const Product& product = *static_cast<const Product*>(context);
  for (; row + ROWS <= end; row += ROWS) rows_for_all<ROWS, Weight>(product, row);
  for (; row < end; ++row) rows_for_all<1, Weight>(product, row);
}

// Even columns, then odd ones, of each COLUMNS; what is left over stays as it is.
inline void order(const float* __restrict states, float* __restrict ordered, int64_t inputs) {
  int64_t i = 0;
  for (; i + COLUMNS <= inputs; i += COLUMNS)
    for (int pair = 0; pair < WIDTH; ++pair) {
      ordered[i + pair] = states[i + 2 * pair];
      ordered[i + WIDTH + pair] = states[i + 2 * pair + 1];
    }
  for (; i < inputs; ++i) ordered[i] = states[i];
}

template <typename Weight>
void all_rows(Product product) {
  static thread_local Room room;
  const int64_t inputs = product.inputs;
  if constexpr (std::is_same_v<Weight, BFloat16>) {
    float* ordered = room.of(product.tokens * inputs);
    for (int64_t token = 0; token < product.tokens; ++token)
      order(product.states + token * inputs, ordered + token * inputs, inputs);
    product.states = ordered;
  }
  const int64_t grain = std::max<int64_t>(ROWS, GRAIN / std::max<int64_t>(inputs, 1));
  for_all(product.outputs, grain, some_rows<Weight>, &product);
}

}  // namespace

// result [tokens, outputs] of states [tokens, inputs] in float32 and weight [outputs, inputs] in float32 or bfloat16, or
// [outputs, bytes of a row] as `quantised.h` has it; both contiguous.
extern "C" AOTITorchError aoti_torch_cpu_few_rows_linear(
    AtenTensorHandle states, AtenTensorHandle weight, AtenTensorHandle* result) {
  const Seen of_states(states), of_weight(weight);
  if (!of_states.is_matrix() || !of_weight.is_matrix() || of_states.dtype != aoti_torch_dtype_float32())
    return AOTI_TORCH_FAILURE;
  const bool packed = of_weight.dtype == aoti_torch_dtype_uint8();
  const int bits = packed ? ppd_bits_of_quantised(of_states.sizes[1], of_weight.sizes[1]) : 0;
  const bool whole = of_weight.dtype == aoti_torch_dtype_float32() || of_weight.dtype == aoti_torch_dtype_bfloat16();
  if (packed ? !bits : !whole || of_states.sizes[1] != of_weight.sizes[1]) return AOTI_TORCH_FAILURE;
  const int64_t sizes[] = {of_states.sizes[0], of_weight.sizes[0]}, strides[] = {of_weight.sizes[0], 1};
  const AOTITorchError error = aoti_torch_empty_strided(
      2, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  if (packed) {
    ppd_quantised_product(
        static_cast<const uint8_t*>(of_weight.at), bits, of_states.floats(), Seen(*result).floats(), of_states.sizes[1],
        of_weight.sizes[0], of_states.sizes[0]);
    return AOTI_TORCH_SUCCESS;
  }
  const Product product{
      of_weight.at, of_states.floats(), Seen(*result).floats(), of_weight.sizes[1], of_weight.sizes[0],
      of_states.sizes[0]};
  of_weight.dtype == aoti_torch_dtype_bfloat16() ? all_rows<BFloat16>(product) : all_rows<float>(product);
  return AOTI_TORCH_SUCCESS;
}
