// A pass of few tokens through layers that were compiled one by one, without a step of Python's between them.
//
// What goes in and comes out is memory of the caller's: states [1, tokens, width] and caches [rows, heads, dim], float32.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
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

thread_local std::string error;

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

}  // namespace

extern "C" {

// Null where the library cannot be loaded or is not one of compiled code: see ppd_error.
void* ppd_code(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    const char* reason = dlerror();
    error = reason ? reason : "it cannot be loaded";
    return nullptr;
  }
  error = std::string(library) + " is no library of compiled code";
  auto create = reinterpret_cast<Create>(dlsym(loaded, "AOTInductorModelContainerCreateWithDevice"));
  std::unique_ptr<Code> code(new Code);
  code->remove = reinterpret_cast<Delete>(dlsym(loaded, "AOTInductorModelContainerDelete"));
  code->run = reinterpret_cast<Run>(dlsym(loaded, "AOTInductorModelContainerRunSingleThreaded"));
  if (!code->run) code->run = reinterpret_cast<Run>(dlsym(loaded, "AOTInductorModelContainerRun"));
  if (!create || !code->remove || !code->run || create(&code->container, 1, "cpu", nullptr)) return nullptr;
  return code.release();
}

// What was wrong with the last library of this thread.
const char* ppd_error() { return error.c_str(); }

void ppd_delete_code(void* code) { delete static_cast<Code*>(code); }

// Weights are contiguous, and stay where they are; rank and sizes of one after the other in `shapes`.
void* ppd_layer(void* code, int64_t num_weights, void* const* weights, const int64_t* shapes, const int32_t* dtypes) {
  Layer* layer = new Layer{static_cast<Code*>(code), {}};
  for (int64_t i = 0; i < num_weights; shapes += 1 + *shapes, ++i)
    layer->weights.push_back(of_memory(
        weights[i], std::vector<int64_t>(shapes + 1, shapes + 1 + *shapes), dtypes[i]));
  return layer;
}

void ppd_delete_layer(void* layer) { delete static_cast<Layer*>(layer); }

void* ppd_cache(float* keys, float* values, int64_t heads, int64_t key_dim, int64_t value_dim, int64_t window) {
  Cache* cache = new Cache;
  cache->memory[0] = keys, cache->memory[1] = values;
  cache->heads = heads, cache->dims[0] = key_dim, cache->dims[1] = value_dim, cache->window = window;
  return cache;
}

void ppd_delete_cache(void* cache) { delete static_cast<Cache*>(cache); }

// Run `tokens` tokens' states through layers; a layer without attention has no cache. Without `depths` it is one token, at
// `position`; else a tree's, whose roots stand there. Other than 0 where the code fails.
int ppd_pass(
    void* const* layers, void* const* caches, int64_t count, float* states, int64_t tokens, int64_t width,
    int64_t position, int64_t attended, const int64_t* depths, const bool* sees, float* result, int64_t result_width) {
  const int32_t whole_numbers = aoti_torch_dtype_int64(), floats = aoti_torch_dtype_float32();
  const Tree tree{depths, sees, tokens};
  int64_t places[tokens];
  for (int64_t i = 0; depths && i < tokens; ++i) places[i] = position + depths[i];
  const Handle row = of_memory(&position, {1}, whole_numbers);
  const Handle place = depths ? of_memory(places, {1, tokens}, whole_numbers) : Handle();
  struct Mask {
    int64_t window;
    Handle numbers;
  };
  std::vector<Mask> masks;
  std::vector<AtenTensorHandle> inputs;
  Handle hidden = of_memory(states, {1, tokens, width}, floats);
  for (int64_t i = 0; i < count; ++i) {
    const Layer& layer = *static_cast<const Layer*>(layers[i]);
    inputs.assign(1, hidden.release());
    if (Cache* cache = static_cast<Cache*>(caches ? caches[i] : nullptr)) {
      cache->attend(attended);
      inputs.insert(inputs.end(), {row.another(), cache->rows[0].another(), cache->rows[1].another()});
      if (depths) {
        auto mask = std::find_if(masks.begin(), masks.end(), [&](Mask& m) { return m.window == cache->window; });
        if (mask == masks.end()) {
          mask = masks.insert(mask, {cache->window, empty({1, 1, tokens, attended}, floats)});
          if (!mask->numbers.at) return -2;
          fill_mask(Seen(mask->numbers.at).floats(), tree, position, attended, cache->window);
        }
        inputs.insert(inputs.end(), {place.another(), mask->numbers.another()});
      }
    }
    for (const Handle& weight : layer.weights) inputs.push_back(weight.another());
    const Code& code = *layer.code;
    if (int32_t failed = code.run(code.container, inputs.data(), inputs.size(), &hidden.at, 1, nullptr, nullptr))
      return failed;
  }
  const Seen found(hidden.at);
  int64_t numbers = found.dtype == floats ? 1 : 0;
  for (int64_t axis = found.rank; axis-- > 0; numbers *= found.sizes[axis])
    if (found.sizes[axis] > 1 && found.strides[axis] != numbers) return -1;
  if (numbers != tokens * result_width) return -1;
  std::memcpy(result, found.at, numbers * sizeof(float));
  return 0;
}

}  // extern "C"
