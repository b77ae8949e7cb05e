// Tensors for compiled code that are next to nothing: no allocation, no dispatch, no atomic counts.
//
// Compiled code knows a tensor by a handle, and asks PyTorch's C functions for everything. In a library whose names were
// turned to ours (`layers.py`) it asks the functions of `light_tensors.cpp`, which know both kinds of handle: PyTorch's,
// and those of light tensors, which are odd numbers. A light tensor is of one thread at a time. Its memory goes to the next
// one of about the same size in the thread that deleted it, up to two megabytes.
//
// Other than PyTorch's: a view's storage ends with the view, a copy keeps the strides, and a view has at most MOST_AXES.

#pragma once

#include <cstdint>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace light {

constexpr int64_t MOST_AXES = 16;  // new tensors with more are PyTorch's, views with more fail

struct Block {  // numbers of tensors that share them, 64 bytes behind
  int64_t users, kind;
  void* numbers() { return reinterpret_cast<char*>(this) + 64; }
};

struct Tensor {
  void* at;
  Block* block;  // null: the memory is the caller's
  int64_t rank;
  int64_t sizes[MOST_AXES], strides[MOST_AXES];
  int64_t bytes_of_a_number, offset;  // in numbers, of the first one in its memory
  int32_t dtype;
};

inline bool is_light(AtenTensorHandle handle) { return reinterpret_cast<uintptr_t>(handle) & 1; }

inline Tensor* of(AtenTensorHandle handle) {
  return reinterpret_cast<Tensor*>(reinterpret_cast<uintptr_t>(handle) - 1);
}

inline AtenTensorHandle handle_of(Tensor* tensor) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<uintptr_t>(tensor) + 1);
}

}  // namespace light

// PyTorch's functions of these names, with its prefix, for both kinds of handle. What is made is light, but views, copies
// and further handles of PyTorch's tensors, and what is on another device.
extern "C" {
AOTITorchError ppdl_torch_empty_strided(
    int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index,
    AtenTensorHandle* result);
AOTITorchError ppdl_torch_create_tensor_from_blob(
    void* at, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device,
    int32_t index, AtenTensorHandle* result);
AOTITorchError ppdl_torch_create_tensor_from_blob_v2(
    void* at, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device,
    int32_t index, AtenTensorHandle* result, int32_t layout, const uint8_t* metadata, int64_t metadata_size);
AOTITorchError ppdl_torch__reinterpret_tensor(
    AtenTensorHandle tensor, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t further,
    AtenTensorHandle* result);
AOTITorchError ppdl_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result);
AOTITorchError ppdl_torch_clone(AtenTensorHandle tensor, AtenTensorHandle* result);
AOTITorchError ppdl_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError ppdl_torch_get_data_ptr(AtenTensorHandle tensor, void** result);
AOTITorchError ppdl_torch_get_dim(AtenTensorHandle tensor, int64_t* result);
AOTITorchError ppdl_torch_get_dtype(AtenTensorHandle tensor, int32_t* result);
AOTITorchError ppdl_torch_get_device_type(AtenTensorHandle tensor, int32_t* result);
AOTITorchError ppdl_torch_get_numel(AtenTensorHandle tensor, int64_t* result);
AOTITorchError ppdl_torch_get_sizes(AtenTensorHandle tensor, int64_t** result);
AOTITorchError ppdl_torch_get_strides(AtenTensorHandle tensor, int64_t** result);
AOTITorchError ppdl_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* result);
AOTITorchError ppdl_torch_get_storage_size(AtenTensorHandle tensor, int64_t* result);
}
