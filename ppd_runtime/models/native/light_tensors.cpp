// Light tensors; see light_tensors.h.

#include "light_tensors.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

namespace {

using light::Block;
using light::Tensor;
using light::is_light;
using light::of;

constexpr int KINDS = 16;  // of blocks: 64 bytes, 128, and so on to two megabytes; larger ones are not kept
constexpr size_t MOST_TENSORS = 4096, MOST_BLOCKS = 64;  // that a thread keeps, of each kind

// What one thread has free; memory of the last tensor of a size is still in the core's cache.
struct Free {
  std::vector<Tensor*> tensors;
  std::vector<Block*> blocks[KINDS];
  ~Free();
};

thread_local bool ended = false;  // this thread: who comes now keeps nothing
thread_local Free free_here;

Free::~Free() {
  ended = true;
  for (Tensor* tensor : tensors) std::free(tensor);
  for (auto& of_kind : blocks)
    for (Block* block : of_kind) std::free(block);
}

int64_t bytes_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return 4;
  if (dtype == aoti_torch_dtype_int64()) return 8;
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

Tensor* new_tensor() {
  if (ended || free_here.tensors.empty()) return static_cast<Tensor*>(std::malloc(sizeof(Tensor)));
  Tensor* tensor = free_here.tensors.back();
  free_here.tensors.pop_back();
  return tensor;
}

Block* new_block(int64_t bytes) {
  int64_t kind = 0;
  while (kind < KINDS && (int64_t{64} << kind) < bytes) ++kind;
  Block* block;
  if (kind < KINDS && !ended && !free_here.blocks[kind].empty()) {
    block = free_here.blocks[kind].back();
    free_here.blocks[kind].pop_back();
  } else {
    const int64_t room = kind < KINDS ? int64_t{64} << kind : (bytes + 63) / 64 * 64;
    block = static_cast<Block*>(std::aligned_alloc(64, 64 + room));
    if (!block) return nullptr;
    block->kind = kind;
  }
  block->users = 1;
  return block;
}

void let_go(Tensor* tensor) {
  if (Block* block = tensor->block; block && !--block->users) {
    if (ended || block->kind == KINDS || free_here.blocks[block->kind].size() >= MOST_BLOCKS) std::free(block);
    else free_here.blocks[block->kind].push_back(block);
  }
  if (ended || free_here.tensors.size() >= MOST_TENSORS) std::free(tensor);
  else free_here.tensors.push_back(tensor);
}

AOTITorchError make(
    void* at, Block* block, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype,
    int64_t bytes, AtenTensorHandle* result) {
  Tensor* tensor = new_tensor();
  if (!tensor) return AOTI_TORCH_FAILURE;
  tensor->at = at, tensor->block = block, tensor->rank = rank;
  std::copy(sizes, sizes + rank, tensor->sizes), std::copy(strides, strides + rank, tensor->strides);
  tensor->bytes_of_a_number = bytes, tensor->offset = offset, tensor->dtype = dtype;
  *result = light::handle_of(tensor);
  return AOTI_TORCH_SUCCESS;
}

// From the first number to the last one, with what lies between.
int64_t extent(int64_t rank, const int64_t* sizes, const int64_t* strides) {
  int64_t numbers = 1;
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (!sizes[axis]) return 0;
    numbers += (sizes[axis] - 1) * strides[axis];
  }
  return numbers;
}

// What PyTorch says of its own tensor, or `ours` of a light one.
template <typename T, typename Ours>
AOTITorchError tell(AtenTensorHandle tensor, T* result, AOTITorchError (*theirs)(AtenTensorHandle, T*), Ours ours) {
  if (!is_light(tensor)) return theirs(tensor, result);
  *result = ours(*of(tensor));
  return AOTI_TORCH_SUCCESS;
}

char* moved(void* at, int64_t numbers, int64_t bytes) { return static_cast<char*>(at) + numbers * bytes; }

}  // namespace

extern "C" {

AOTITorchError ppdl_torch_empty_strided(
    int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index,
    AtenTensorHandle* result) {
  if (rank > light::MOST_AXES || device != aoti_torch_device_type_cpu())
    return aoti_torch_empty_strided(rank, sizes, strides, dtype, device, index, result);
  const int64_t bytes = bytes_of(dtype);
  Block* block = new_block(extent(rank, sizes, strides) * bytes);
  if (!block) return AOTI_TORCH_FAILURE;
  return make(block->numbers(), block, rank, sizes, strides, 0, dtype, bytes, result);
}

AOTITorchError ppdl_torch_create_tensor_from_blob(
    void* at, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device,
    int32_t index, AtenTensorHandle* result) {
  if (rank > light::MOST_AXES || device != aoti_torch_device_type_cpu())
    return aoti_torch_create_tensor_from_blob(at, rank, sizes, strides, offset, dtype, device, index, result);
  const int64_t bytes = bytes_of(dtype);
  return make(moved(at, offset, bytes), nullptr, rank, sizes, strides, offset, dtype, bytes, result);
}

AOTITorchError ppdl_torch_create_tensor_from_blob_v2(
    void* at, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device,
    int32_t index, AtenTensorHandle* result, int32_t layout, const uint8_t* metadata, int64_t metadata_size) {
  if (layout != aoti_torch_layout_strided())
    return aoti_torch_create_tensor_from_blob_v2(
        at, rank, sizes, strides, offset, dtype, device, index, result, layout, metadata, metadata_size);
  return ppdl_torch_create_tensor_from_blob(at, rank, sizes, strides, offset, dtype, device, index, result);
}

AOTITorchError ppdl_torch__reinterpret_tensor(
    AtenTensorHandle tensor, int64_t rank, const int64_t* sizes, const int64_t* strides, int64_t further,
    AtenTensorHandle* result) {
  if (!is_light(tensor)) return aoti_torch__reinterpret_tensor(tensor, rank, sizes, strides, further, result);
  if (rank > light::MOST_AXES) return AOTI_TORCH_FAILURE;
  const Tensor& whole = *of(tensor);
  if (whole.block) ++whole.block->users;
  const int64_t bytes = whole.bytes_of_a_number;
  return make(
      moved(whole.at, further, bytes), whole.block, rank, sizes, strides, whole.offset + further, whole.dtype, bytes,
      result);
}

AOTITorchError ppdl_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result) {
  if (!is_light(tensor)) return aoti_torch_new_tensor_handle(tensor, result);
  const Tensor& same = *of(tensor);
  return ppdl_torch__reinterpret_tensor(tensor, same.rank, same.sizes, same.strides, 0, result);
}

AOTITorchError ppdl_torch_clone(AtenTensorHandle tensor, AtenTensorHandle* result) {
  if (!is_light(tensor)) return aoti_torch_clone(tensor, result);
  const Tensor& same = *of(tensor);
  const AOTITorchError error = ppdl_torch_empty_strided(
      same.rank, same.sizes, same.strides, same.dtype, aoti_torch_device_type_cpu(), 0, result);
  if (error == AOTI_TORCH_SUCCESS)
    std::memcpy(of(*result)->at, same.at, extent(same.rank, same.sizes, same.strides) * same.bytes_of_a_number);
  return error;
}

AOTITorchError ppdl_torch_delete_tensor_object(AtenTensorHandle tensor) {
  if (!is_light(tensor)) return aoti_torch_delete_tensor_object(tensor);
  let_go(of(tensor));
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError ppdl_torch_get_data_ptr(AtenTensorHandle tensor, void** result) {
  return tell(tensor, result, aoti_torch_get_data_ptr, [](Tensor& t) { return t.at; });
}

AOTITorchError ppdl_torch_get_dim(AtenTensorHandle tensor, int64_t* result) {
  return tell(tensor, result, aoti_torch_get_dim, [](Tensor& t) { return t.rank; });
}

AOTITorchError ppdl_torch_get_dtype(AtenTensorHandle tensor, int32_t* result) {
  return tell(tensor, result, aoti_torch_get_dtype, [](Tensor& t) { return t.dtype; });
}

AOTITorchError ppdl_torch_get_device_type(AtenTensorHandle tensor, int32_t* result) {
  return tell(tensor, result, aoti_torch_get_device_type, [](Tensor&) { return aoti_torch_device_type_cpu(); });
}

AOTITorchError ppdl_torch_get_sizes(AtenTensorHandle tensor, int64_t** result) {
  return tell(tensor, result, aoti_torch_get_sizes, [](Tensor& t) { return t.sizes; });
}

AOTITorchError ppdl_torch_get_strides(AtenTensorHandle tensor, int64_t** result) {
  return tell(tensor, result, aoti_torch_get_strides, [](Tensor& t) { return t.strides; });
}

AOTITorchError ppdl_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* result) {
  return tell(tensor, result, aoti_torch_get_storage_offset, [](Tensor& t) { return t.offset; });
}

AOTITorchError ppdl_torch_get_numel(AtenTensorHandle tensor, int64_t* result) {
  return tell(tensor, result, aoti_torch_get_numel, [](Tensor& t) {
    return std::accumulate(t.sizes, t.sizes + t.rank, int64_t{1}, std::multiplies<>());
  });
}

AOTITorchError ppdl_torch_get_storage_size(AtenTensorHandle tensor, int64_t* result) {
  return tell(tensor, result, aoti_torch_get_storage_size, [](Tensor& t) {
    return (t.offset + extent(t.rank, t.sizes, t.strides)) * t.bytes_of_a_number;
  });
}

}  // extern "C"
