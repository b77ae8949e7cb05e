// What Python holds of compiled layers and their caches, and a pass through them.
//
// What goes in and comes out is memory of the caller's: states [1, tokens, width] and caches [rows, heads, dim], float32.

#include <dlfcn.h>

#include <memory>
#include <string>

#include "passes.h"

namespace {

thread_local std::string error;

}  // namespace

extern "C" {

// Null where the library cannot be loaded or is not one of compiled code: see ppd_error. Whether its names for tensors'
// functions were turned to ours, and whether it reads masks, the caller knows.
void* ppd_code(const char* library, int takes_light, int reads_mask) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!loaded) {
    const char* reason = dlerror();
    error = reason ? reason : "it cannot be loaded";
    return nullptr;
  }
  error = std::string(library) + " is no library of compiled code";
  auto create = reinterpret_cast<Create>(dlsym(loaded, "AOTInductorModelContainerCreateWithDevice"));
  std::unique_ptr<Code> code(new Code);
  code->takes_light = takes_light, code->reads_mask = reads_mask;
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
        weights[i], std::vector<int64_t>(shapes + 1, shapes + 1 + *shapes), dtypes[i],
        layer->code->takes_light));
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

// Run tokens' states through layers; a layer without attention has no cache. There are as many tokens as in all trees, which
// are as in `Trees`. Other than 0 where the code fails.
int ppd_pass(
    void* const* layers, void* const* caches, int64_t count, float* states, int64_t tokens, int64_t width,
    const void* trees, int64_t num_trees, int64_t attended, float* result, int64_t result_width) {
  Handle hidden = of_memory(states, {1, tokens, width}, aoti_torch_dtype_float32());
  hidden = run_layers({layers, caches, count}, std::move(hidden), Trees{static_cast<const Tree*>(trees), num_trees}, attended);
  if (!hidden.at) return -2;
  const float* found = numbers_of(hidden, tokens * result_width);
  if (!found) return -1;
  std::memcpy(result, found, tokens * result_width * sizeof(float));
  return 0;
}

}  // extern "C"
