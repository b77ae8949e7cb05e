// What a tensor holds, PyTorch's or a light one, and PyTorch's threads.

#pragma once

#include <cstdint>

#include "light_tensors.h"

// PyTorch's threads, where this version has them to share.
extern "C" __attribute__((weak)) AOTITorchError torch_parallel_for(
    int64_t begin, int64_t end, int64_t grain_size, void (*part)(int64_t, int64_t, void*), void* context);

namespace {

struct Seen {
  void* at;
  int64_t *sizes, *strides, rank;
  int32_t dtype;

  explicit Seen(AtenTensorHandle tensor) {
    ppdl_torch_get_data_ptr(tensor, &at);
    ppdl_torch_get_sizes(tensor, &sizes);
    ppdl_torch_get_strides(tensor, &strides);
    ppdl_torch_get_dim(tensor, &rank);
    ppdl_torch_get_dtype(tensor, &dtype);
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

// Floats of this shape, of the kind that the tensor `like` is.
inline AOTITorchError floats_like(
    AtenTensorHandle like, int64_t rank, const int64_t* sizes, const int64_t* strides, AtenTensorHandle* result) {
  return (light::is_light(like) ? ppdl_torch_empty_strided : aoti_torch_empty_strided)(
      rank, sizes, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, result);
}

// Run `part` over `count` things, with PyTorch's threads where there are more than `grain`.
inline void for_all(int64_t count, int64_t grain, void (*part)(int64_t, int64_t, void*), void* context) {
  if (torch_parallel_for == nullptr || count <= grain ||
      torch_parallel_for(0, count, grain, part, context) != AOTI_TORCH_SUCCESS)
    part(0, count, context);
}

}  // namespace
