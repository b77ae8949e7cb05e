// Passes of few tokens through layers that were compiled one by one, without a step of Python's between them.

#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "tensors.h"

namespace {

// As torch/csrc/inductor/aoti_runtime/interface.h declares them, which is not for code outside of a model's own.
typedef int32_t (*Create)(void** container, size_t num_models, const char* device, const char* folder);
typedef int32_t (*Delete)(void* container);
typedef int32_t (*Run)(
    void* container, AtenTensorHandle* inputs, size_t num_inputs, AtenTensorHandle* outputs, size_t num_outputs,
    void* stream, void* proxy);

struct Handle {  // owns what a handle stands for
  AtenTensorHandle at = nullptr;
  Handle() = default;
  Handle(Handle&& other) : at(other.release()) {}
  Handle& operator=(Handle&& other) {
    std::swap(at, other.at);
    return *this;
  }
  ~Handle() {
    if (at) aoti_torch_delete_tensor_object(at);
  }
  AtenTensorHandle release() {
    AtenTensorHandle released = at;
    at = nullptr;
    return released;
  }
  // For a call that takes what it is given away.
  AtenTensorHandle another() const {
    AtenTensorHandle copy = nullptr;
    aoti_torch_new_tensor_handle(at, &copy);
    return copy;
  }
};

Handle of_memory(void* at, std::vector<int64_t> sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  Handle handle;
  aoti_torch_create_tensor_from_blob(
      at, sizes.size(), sizes.data(), strides.data(), 0, dtype, aoti_torch_device_type_cpu(), 0, &handle.at);
  return handle;
}

Handle empty(std::vector<int64_t> sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  Handle handle;
  aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle.at);
  return handle;
}

struct Code {
  void* container = nullptr;
  Delete remove = nullptr;
  Run run = nullptr;
  ~Code() {
    if (container) remove(container);
  }
};

struct Layer {
  Code* code;
  std::vector<Handle> weights;
};

struct Cache {
  float* memory[2] = {};  // of keys and values
  int64_t heads = 0, dims[2] = {}, window = 0;  // 0: none
  int64_t attended = 0;
  Handle rows[2];  // the first `attended` of them

  void attend(int64_t num_rows) {
    if (attended == num_rows) return;
    for (int i = 0; i < 2; ++i) rows[i] = of_memory(memory[i], {num_rows, heads, dims[i]}, aoti_torch_dtype_float32());
    attended = num_rows;
  }
};

// Tokens that are run together, each behind its own text: all numbers count from where their tree stands, and the text
// before it lies in the rows of its positions. What is behind a token's own depth in its tail may be any row.
struct Tree {
  const int64_t* rows;    // [size]: where each token's entries go
  const int64_t* depths;  // [size]: tokens of the tree before it, on its path
  const int64_t* tails;   // [size, depth]: rows of its path at the last `depth` depths of the tree
  int64_t size, depth;
};

// What tokens see of a cache's first rows, where their tree stands at `position`.
void fill_mask(float* mask, const Tree& tree, int64_t position, int64_t rows, int64_t window) {
  const float hidden = std::numeric_limits<float>::lowest();
  const int64_t first = *std::max_element(tree.depths, tree.depths + tree.size) + 1 - tree.depth;
  for (int64_t token = 0; token < tree.size; ++token, mask += rows) {
    const int64_t depth = tree.depths[token], oldest = window ? depth - window + 1 : -position;  // that is near enough
    const int64_t in_place = std::min(first, depth + 1);
    std::fill(mask, mask + rows, hidden);
    for (int64_t i = std::max(oldest, -position); i < in_place; ++i) mask[position + i] = 0.0f;
    for (int64_t i = std::max(oldest, first); i <= depth; ++i)
      mask[position + tree.tails[token * tree.depth + i - first]] = 0.0f;
  }
}

struct Route {  // layers in their order, and a cache for each, null for one without attention
  void* const* layers;
  void* const* caches;  // null: none has any
  int64_t count;
};

// States [1, tokens, width] behind a route's layers, contiguous; null where the code fails. Without `rows` of a tree they are
// one token's, at `position`; else the tree's, which stands there.
Handle run_layers(const Route& route, Handle hidden, const Tree& tree, int64_t position, int64_t attended) {
  const int32_t whole_numbers = aoti_torch_dtype_int64(), floats = aoti_torch_dtype_float32();
  std::vector<int64_t> numbers(1, position);
  for (int64_t i = 0; tree.rows && i < tree.size; ++i) numbers.push_back(position + tree.rows[i]);
  for (int64_t i = 0; tree.rows && i < tree.size; ++i) numbers.push_back(position + tree.depths[i]);
  for (int64_t i = 0; tree.rows && i < tree.size * tree.depth; ++i) numbers.push_back(position + tree.tails[i]);
  int64_t* const at = numbers.data() + 1;
  const Handle row = tree.rows ? of_memory(at, {tree.size}, whole_numbers) : of_memory(at - 1, {1}, whole_numbers);
  Handle place, tail;
  if (tree.rows) place = of_memory(at + tree.size, {1, tree.size}, whole_numbers);
  if (tree.rows) tail = of_memory(at + 2 * tree.size, {tree.size, tree.depth}, whole_numbers);
  struct Mask {
    int64_t window;
    Handle numbers;
  };
  std::vector<Mask> masks;
  std::vector<AtenTensorHandle> inputs;
  for (int64_t i = 0; i < route.count; ++i) {
    const Layer& layer = *static_cast<const Layer*>(route.layers[i]);
    inputs.assign(1, hidden.release());
    if (Cache* cache = static_cast<Cache*>(route.caches ? route.caches[i] : nullptr)) {
      cache->attend(attended);
      inputs.insert(inputs.end(), {row.another(), cache->rows[0].another(), cache->rows[1].another()});
      if (tree.rows) {
        auto mask = std::find_if(masks.begin(), masks.end(), [&](Mask& m) { return m.window == cache->window; });
        if (mask == masks.end()) {
          mask = masks.insert(mask, {cache->window, empty({1, 1, tree.size, attended}, floats)});
          if (!mask->numbers.at) return Handle();
          fill_mask(Seen(mask->numbers.at).floats(), tree, position, attended, cache->window);
        }
        inputs.insert(inputs.end(), {place.another(), mask->numbers.another(), tail.another()});
      }
    }
    for (const Handle& weight : layer.weights) inputs.push_back(weight.another());
    const Code& code = *layer.code;
    if (code.run(code.container, inputs.data(), inputs.size(), &hidden.at, 1, nullptr, nullptr)) return Handle();
  }
  return hidden;
}

// A result's numbers, where they are `count` floats side by side; else null.
const float* numbers_of(const Handle& result, int64_t count) {
  const Seen found(result.at);
  int64_t numbers = found.dtype == aoti_torch_dtype_float32() ? 1 : 0;
  for (int64_t axis = found.rank; axis-- > 0; numbers *= found.sizes[axis])
    if (found.sizes[axis] > 1 && found.strides[axis] != numbers) return nullptr;
  return numbers == count ? found.floats() : nullptr;
}

}  // namespace
