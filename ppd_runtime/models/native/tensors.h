// What a tensor of PyTorch's holds, and its threads.

#pragma once

#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// PyTorch's threads, where this version has them to share.
extern "C" __attribute__((weak)) AOTITorchError torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain_size, void (*part)(int64_t, int64_t, void*), void* context);

namespace {

struct Seen {
  void* at;
  int64_t *sizes, *strides, rank;
  int32_t dtype;

  explicit Seen(AtenTensorHandle tensor) {
    aoti_torch_get_data_ptr(tensor, &at);
    aoti_torch_get_sizes(tensor, &sizes);
    aoti_torch_get_strides(tensor, &strides);
    aoti_torch_get_dim(tensor, &rank);
    aoti_torch_get_dtype(tensor, &dtype);
  }

  float* floats() const { return static_cast<float*>(at); }

  int64_t* whole_numbers() const { return static_cast<int64_t*>(at); }

  bool is_matrix() const {
    return rank == 2 && (sizes[0] <= 1 || strides[0] == sizes[1]) && (sizes[1] <= 1 || strides[1] == 1);
  }

  bool is_whole_matrix() const { return is_matrix() && dtype == aoti_torch_dtype_int64(); }

  // Of one sequence, in float32, with the numbers of the last axis side by side.
  bool has_rows() const {
    return rank == 4 && dtype == aoti_torch_dtype_float32() && sizes[0] == 1 && (sizes[3] <= 1 || strides[3] == 1);
  }
};

// Run `part` over `count` things, with PyTorch's threads where there are more than `grain`.
inline void for_all(int64_t count, int64_t grain, void (*part)(int64_t, int64_t, void*), void* context) {
  if (torch_parallel_for == nullptr || count <= grain ||
      torch_parallel_for(0, count, grain, part, context) != AOTI_TORCH_SUCCESS)
    part(0, count, context);
}

}  // namespace
