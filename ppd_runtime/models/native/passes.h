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

// Who stands behind whom among tokens that are run together.
struct Tree {
  const int64_t* depths;  // [size]
  const bool* sees;       // [size, size]
  int64_t size;
};

// What tokens see of a cache's first rows, where their tree's roots stand at `position`.
void fill_mask(float* mask, const Tree& tree, int64_t position, int64_t rows, int64_t window) {
  const float hidden = std::numeric_limits<float>::lowest();
  for (int64_t token = 0; token < tree.size; ++token, mask += rows) {
    const int64_t oldest = window ? position + tree.depths[token] - window + 1 : 0;  // that is near enough
    for (int64_t row = 0; row < rows; ++row) mask[row] = row < oldest || row >= position ? hidden : 0.0f;
    for (int64_t node = 0; node < tree.size && position + node < rows; ++node) {
      const bool near = !window || position + tree.depths[node] >= oldest;
      mask[position + node] = near && tree.sees[token * tree.size + node] ? 0.0f : hidden;
    }
  }
}

struct Route {  // layers in their order, and a cache for each, null for one without attention
  void* const* layers;
  void* const* caches;  // null: none has any
  int64_t count;
};

// States [1, tokens, width] behind a route's layers, contiguous; null where the code fails. Without `depths` of a tree they
// are one token's, at `position`; else the tree's, whose roots stand there.
Handle run_layers(const Route& route, Handle hidden, const Tree& tree, int64_t position, int64_t attended) {
  const int32_t whole_numbers = aoti_torch_dtype_int64(), floats = aoti_torch_dtype_float32();
  int64_t places[tree.size];
  for (int64_t i = 0; tree.depths && i < tree.size; ++i) places[i] = position + tree.depths[i];
  const Handle row = of_memory(&position, {1}, whole_numbers);
  const Handle place = tree.depths ? of_memory(places, {1, tree.size}, whole_numbers) : Handle();
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
      if (tree.depths) {
        auto mask = std::find_if(masks.begin(), masks.end(), [&](Mask& m) { return m.window == cache->window; });
        if (mask == masks.end()) {
          mask = masks.insert(mask, {cache->window, empty({1, 1, tree.size, attended}, floats)});
          if (!mask->numbers.at) return Handle();
          fill_mask(Seen(mask->numbers.at).floats(), tree, position, attended, cache->window);
        }
        inputs.insert(inputs.end(), {place.another(), mask->numbers.another()});
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
