// Products of a few tokens' states with a weight matrix: each weight is read once, whatever the number of tokens.
//
// One sum for each token and row, in an order that only the number of columns and the weights' dtype decide: the bits of a
// token's product depend neither on the tokens beside it nor on how rows are shared out. Weights are read a few blocks
// ahead, since a core that waits for each line reaches half of the memory's speed.

#include <algorithm>
#include <numeric>
#include <vector>

#include "tensors.h"
#include "tiled_products.h"
#include "vectors.h"

namespace {

constexpr int ROWS = 4;             // of the weights, at a time
constexpr int MOST_WEIGHTS = 3;     // in one call
constexpr int MOST_TOKENS = 6;      // at a time: ROWS * MOST_TOKENS sums stay in registers
constexpr int AHEAD = 4;            // blocks of ROWS that are fetched before they are needed
constexpr int64_t GRAIN = 1 << 17;  // weights, for which a thread of its own pays

struct Product {
  const float* weight;  // [outputs, inputs]
  const float* states;  // [tokens, inputs]
  float* result;        // of the first token
  int64_t inputs, outputs, tokens, between;  // the results of a token and those of the next one
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

template <int NUM_ROWS, int NUM_TOKENS>
inline void block(const Product& product, int64_t row, int64_t token) {
  const int64_t inputs = product.inputs, whole = inputs - inputs % WIDTH;
  const float* weight = product.weight + row * inputs;
  const float* states = product.states + token * inputs;
  Vec sums[NUM_ROWS][NUM_TOKENS] = {};
  for (int64_t i = 0; i < whole; i += WIDTH) {
    Vec rows[NUM_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; ++r) {
      rows[r] = load(weight + r * inputs + i);
      __builtin_prefetch(weight + (AHEAD * NUM_ROWS + r) * inputs + i, 0, 3);
    }
#pragma GCC unroll 8
    for (int t = 0; t < NUM_TOKENS; ++t) {
      const Vec state = load(states + t * inputs + i);
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; ++r) sums[r][t] = added(rows[r], state, sums[r][t]);
    }
  }
  float found[NUM_TOKENS][NUM_ROWS];
  sum_up<NUM_ROWS, NUM_TOKENS>(sums, found);
  for (int t = 0; t < NUM_TOKENS; ++t) {
    for (int64_t i = whole; i < inputs; ++i)
      for (int r = 0; r < NUM_ROWS; ++r)
        found[t][r] = added(weight[r * inputs + i], states[t * inputs + i], found[t][r]);
    std::memcpy(product.result + (token + t) * product.between + row, found[t], sizeof found[t]);
  }
}

template <int NUM_ROWS>
inline void rows_for(const Product& product, int64_t row, int64_t token, int64_t tokens) {
  switch (tokens) {
    case 1: return block<NUM_ROWS, 1>(product, row, token);
    case 2: return block<NUM_ROWS, 2>(product, row, token);
    case 3: return block<NUM_ROWS, 3>(product, row, token);
    case 4: return block<NUM_ROWS, 4>(product, row, token);
    case 5: return block<NUM_ROWS, 5>(product, row, token);
    case 6: return block<NUM_ROWS, 6>(product, row, token);
  }
}

template <int NUM_ROWS>
inline void rows_for_all(const Product& product, int64_t row) {
  const int64_t groups = (product.tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (int64_t group = 0, token = 0; group < groups; ++group) {
    const int64_t tokens = product.tokens / groups + (group < product.tokens % groups);
    rows_for<NUM_ROWS>(product, row, token, tokens);
    token += tokens;
  }
}

void some_rows(int64_t row, int64_t end, void* context) {
  const Product& product = *static_cast<const Product*>(context);
  for (; row + ROWS <= end; row += ROWS) rows_for_all<ROWS>(product, row);
  for (; row < end; ++row) rows_for_all<1>(product, row);
}

void float_product(Product product) {
  const int64_t grain = std::max<int64_t>(ROWS, GRAIN / std::max<int64_t>(product.inputs, 1));
  for_all(product.outputs, grain, some_rows, &product);
}

// What a weight is: float32, or bfloat16 as `bfloat16.cpp` has it, or packed as `quantised.h` has it.
enum Kind { NONE, FLOAT, BFLOAT16, PACKED };

Kind kind_of(const Seen& weight, int64_t inputs, Matrix* matrix) {
  if (weight.dtype == aoti_torch_dtype_uint8()) {
    if (weight.rank != 1 || (weight.sizes[0] > 1 && weight.strides[0] != 1)) return NONE;
    *matrix = ppd_packed_matrix(weight.at, weight.sizes[0], inputs);
    return matrix->at ? PACKED : NONE;
  }
  if (!weight.is_matrix() || weight.sizes[1] != inputs) return NONE;
  const bool halved = weight.dtype == aoti_torch_dtype_bfloat16();
  *matrix = {weight.at, weight.sizes[0], inputs * (halved ? 2 : 4)};
  return halved ? BFLOAT16 : weight.dtype == aoti_torch_dtype_float32() ? FLOAT : NONE;
}

void run(const Products& products, Kind kind) {
  if (kind == PACKED) return ppd_quantised_products(products);
  if (kind == BFLOAT16) return ppd_bfloat16_products(products);
  float* result = products.result;
  for (int m = 0; m < products.count; result += products.matrices[m++].outputs)
    float_product(
        {static_cast<const float*>(products.matrices[m].at), products.states, result, products.inputs,
         products.matrices[m].outputs, products.tokens, products.between});
}

AOTITorchError run_all(AtenTensorHandle states, const AtenTensorHandle* weights, int count, AtenTensorHandle* result) {
  const Seen given(states);
  if (!given.is_matrix() || given.dtype != aoti_torch_dtype_float32()) return AOTI_TORCH_FAILURE;
  const int64_t tokens = given.sizes[0], inputs = given.sizes[1];
  Matrix matrices[MOST_WEIGHTS];
  Kind kinds[MOST_WEIGHTS];
  int64_t outputs = 0;
  for (int m = 0; m < count; ++m) {
    kinds[m] = kind_of(Seen(weights[m]), inputs, &matrices[m]);
    if (kinds[m] == NONE) return AOTI_TORCH_FAILURE;
    outputs += matrices[m].outputs;
  }
  const int64_t sizes[] = {tokens, outputs}, strides[] = {outputs, 1};
  const AOTITorchError error = floats_like(states, 2, sizes, strides, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  float* found = Seen(*result).floats();
  for (int m = 0, next; m < count; m = next) {
    int64_t some = 0;
    for (next = m; next < count && kinds[next] == kinds[m]; ++next) some += matrices[next].outputs;
    run({&matrices[m], next - m, given.floats(), found, inputs, tokens, outputs}, kinds[m]);
    found += some;
  }
  return AOTI_TORCH_SUCCESS;
}

// One of the matrices in a tensor: packed ones, uint8 [matrices, bytes], or [matrices, outputs, inputs] as a weight is.
Kind kind_of(const Seen& weights, int64_t number, int64_t inputs, Matrix* matrix) {
  if (weights.rank < 2 || number < 0 || number >= weights.sizes[0]) return NONE;
  const int64_t of_number = weights.dtype == aoti_torch_dtype_uint8()      ? 1
                            : weights.dtype == aoti_torch_dtype_bfloat16() ? 2
                                                                           : 4;
  Seen one = weights;
  one.at = static_cast<uint8_t*>(one.at) + number * weights.strides[0] * of_number;
  --one.rank, ++one.sizes, ++one.strides;
  return kind_of(one, inputs, matrix);
}

// A product of so many rows of states, numbered by pairs of a row and a matrix, with one matrix.
struct Chosen {
  Kind kind;
  const float* states;
  float* result;
  int64_t each, inputs, outputs;  // `each` pairs of a row are neighbours

  void run_with(const Matrix& matrix, const int64_t* pairs, int64_t count) const {
    if (count == 1) return run({&matrix, 1, row_of(*pairs), result + *pairs * outputs, inputs, 1, outputs}, kind);
    std::vector<float> some(count * inputs), products(count * outputs);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(&some[i * inputs], row_of(pairs[i]), inputs * sizeof(float));
    run({&matrix, 1, some.data(), products.data(), inputs, count, outputs}, kind);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(result + pairs[i] * outputs, &products[i * outputs], outputs * sizeof(float));
  }

  const float* row_of(int64_t pair) const { return states + pair / each * inputs; }
};

AOTITorchError run_chosen(
    AtenTensorHandle states, AtenTensorHandle weights, AtenTensorHandle chosen, AtenTensorHandle* result) {
  const Seen given(states), numbers(chosen);
  if (!given.is_matrix() || given.dtype != aoti_torch_dtype_float32() || !numbers.is_whole_matrix() ||
      numbers.sizes[0] != given.sizes[0])
    return AOTI_TORCH_FAILURE;
  const int64_t inputs = given.sizes[1], each = numbers.sizes[1];
  const int64_t* numbered = numbers.whole_numbers();
  const int64_t count = numbers.sizes[0] * each;
  const Seen all(weights);
  Matrix first;
  const Kind kind = kind_of(all, 0, inputs, &first);
  if (kind == NONE) return AOTI_TORCH_FAILURE;
  std::vector<Matrix> matrices(count);  // of each pair: those that nothing chose are not looked at
  for (int64_t pair = 0; pair < count; ++pair)
    if (kind_of(all, numbered[pair], inputs, &matrices[pair]) != kind || matrices[pair].outputs != first.outputs)
      return AOTI_TORCH_FAILURE;
  const int64_t outputs = first.outputs;
  const int64_t sizes[] = {count, outputs}, strides[] = {outputs, 1};
  const AOTITorchError error = floats_like(states, 2, sizes, strides, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  const Chosen products{kind, given.floats(), Seen(*result).floats(), each, inputs, outputs};
  if (numbers.sizes[0] == 1) {  // all of them read the same states
    run({matrices.data(), int(count), products.states, products.result, inputs, 1, count * outputs}, kind);
    return AOTI_TORCH_SUCCESS;
  }
  std::vector<int64_t> pairs(count);
  std::iota(pairs.begin(), pairs.end(), 0);
  std::stable_sort(pairs.begin(), pairs.end(), [&](int64_t a, int64_t b) { return numbered[a] < numbered[b]; });
  for (int64_t begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && numbered[pairs[end]] == numbered[pairs[begin]];) ++end;
    products.run_with(matrices[pairs[begin]], &pairs[begin], end - begin);
  }
  return AOTI_TORCH_SUCCESS;
}

}  // namespace

extern "C" {

// result [tokens, outputs] of states [tokens, inputs] in float32 and a weight, contiguous, as `kind_of` has them.
AOTITorchError aoti_torch_cpu_few_rows_linear(AtenTensorHandle states, AtenTensorHandle weight, AtenTensorHandle* result) {
  return run_all(states, &weight, 1, result);
}

// The same with several weights: the outputs of one behind those of the other.
AOTITorchError aoti_torch_cpu_few_rows_linear_2(
    AtenTensorHandle states, AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle* result) {
  const AtenTensorHandle weights[] = {first, second};
  return run_all(states, weights, 2, result);
}

AOTITorchError aoti_torch_cpu_few_rows_linear_3(
    AtenTensorHandle states, AtenTensorHandle first, AtenTensorHandle second, AtenTensorHandle third,
    AtenTensorHandle* result) {
  const AtenTensorHandle weights[] = {first, second, third};
  return run_all(states, weights, 3, result);
}

// result [rows * each, outputs] of states [rows, inputs] in float32 and, for each row, the matrices that its numbers in
// `chosen` [rows, each] name, as `kind_of` has them. A matrix is read once for all its rows.
AOTITorchError aoti_torch_cpu_chosen_linear(
    AtenTensorHandle states, AtenTensorHandle weights, AtenTensorHandle chosen, AtenTensorHandle* result) {
  return run_chosen(states, weights, chosen, result);
}

}  // extern "C"
