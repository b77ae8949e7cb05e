// Passes of few tokens through layers that were compiled one by one, without a step of Python's between them.

#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
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
    if (at) ppdl_torch_delete_tensor_object(at);
  }
  AtenTensorHandle release() {
    AtenTensorHandle released = at;
    at = nullptr;
    return released;
  }
  // For a call that takes what it is given away.
  AtenTensorHandle another() const {
    AtenTensorHandle copy = nullptr;
    ppdl_torch_new_tensor_handle(at, &copy);
    return copy;
  }
};

std::vector<int64_t> contiguous(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

// Light, or PyTorch's for compiled code that asks PyTorch.
Handle of_memory(void* at, const std::vector<int64_t>& sizes, int32_t dtype, bool is_light = true) {
  const auto create = is_light ? ppdl_torch_create_tensor_from_blob : aoti_torch_create_tensor_from_blob;
  Handle handle;
  create(
      at, sizes.size(), sizes.data(), contiguous(sizes).data(), 0, dtype, aoti_torch_device_type_cpu(), 0, &handle.at);
  return handle;
}

Handle new_floats(const std::vector<int64_t>& sizes) {
  Handle handle;
  ppdl_torch_empty_strided(
      sizes.size(), sizes.data(), contiguous(sizes).data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
      &handle.at);
  return handle;
}

struct Code {
  bool takes_light = false;  // whether it may be given light tensors; if not, PyTorch's alone
  bool reads_mask = false;   // whether it has attention that adds a mask to scores, and reads no lists
  void* container = nullptr;
  Delete remove = nullptr;
  Run run = nullptr;
  ~Code() {
    if (container) remove(container);
  }

  // For a call that takes a handle away, and of whose results none is this memory.
  AtenTensorHandle lent(const Handle& tensor) const {
    if (takes_light || !light::is_light(tensor.at)) return tensor.another();
    const Seen seen(tensor.at);
    AtenTensorHandle same = nullptr;
    aoti_torch_create_tensor_from_blob(
        seen.at, seen.rank, seen.sizes, seen.strides, 0, seen.dtype, aoti_torch_device_type_cpu(), 0, &same);
    return same;
  }

  // For one whose result may be this memory.
  AtenTensorHandle given(Handle states) const {
    if (takes_light || !light::is_light(states.at)) return states.release();
    const Seen seen(states.at);
    AtenTensorHandle copy = nullptr;
    aoti_torch_empty_strided(seen.rank, seen.sizes, seen.strides, seen.dtype, aoti_torch_device_type_cpu(), 0, &copy);
    int64_t numbers = 1;
    for (int64_t axis = 0; axis < seen.rank; ++axis) numbers += (seen.sizes[axis] - 1) * seen.strides[axis];
    if (copy) std::memcpy(Seen(copy).at, seen.at, numbers * sizeof(float));
    return copy;
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

// Tokens that are run together, each behind its own text: all numbers count from where their tree stands. A text and the tree
// behind it lie in the rows of `list`, by position, counted from `first_row` on; what stands in a tree's row i is in that of
// position `position + i`. What is behind a token's own depth in its tail may be any row.
struct Tree {
  const int64_t* rows;    // [size]: where each token's entries go
  const int64_t* depths;  // [size]: tokens of the tree before it, on its path
  const int64_t* tails;   // [size, depth]: rows of its path at the last `depth` depths of the tree
  int64_t size, depth;
  int64_t position;           // where it stands
  int64_t first_row;          // of its sequence
  const int64_t* list;        // null: what attends to none

  int64_t deepest() const { return rows ? *std::max_element(depths, depths + size) : 0; }
};

// Trees that are run together, each over a text of its own; or one without `rows`: a single token, or what attends to none.
struct Trees {
  const Tree* at;
  int64_t count;
  const Tree* end() const { return at + count; }
};

// Of the tokens of trees: their rows, their places, what each token's list has in common with the one before, and the lists,
// as `few_tokens_attention` takes them; or each from its first position on.
class Numbers {
 public:
  int64_t size = 0, end = 0;
  int64_t *row, *place, *common;
  const int64_t* lists;

  Numbers(const Trees& trees, bool has_whole_lists) {
    for (const Tree* tree = trees.at; tree < trees.end(); ++tree)
      size += tree->size, end = std::max(end, tree->position + tree->deepest() + 1);
    of_tokens.resize(3 * size);
    row = of_tokens.data(), place = row + size, common = place + size;
    if (!trees.at->rows) {
      lists = trees.at->list, *row = lists[trees.at->position], *place = trees.at->position, *common = 0;
      return;
    }
    if (static_cast<int64_t>(of_lists.size()) < size * end) of_lists.resize(size * end);
    lists = of_lists.data();
    int64_t token = 0;
    for (const Tree* tree = trees.at; tree < trees.end(); token += tree->size, ++tree) {
      for (int64_t i = 0; i < tree->size; ++i)
        if (!i || has_whole_lists) add_text(*tree, token + i);
      add_paths(*tree, token);
    }
  }

 private:
  // A thread's own: to ask for so much memory for each pass takes long.
  static inline thread_local std::vector<int64_t> of_tokens, of_lists;

  void add_text(const Tree& tree, int64_t token) {
    int64_t* const list = of_lists.data() + token * end;
    for (int64_t i = 0; i < tree.position; ++i) list[i] = tree.first_row + tree.list[i];
  }

  void add_paths(const Tree& tree, int64_t first) {
    const int64_t in_place = tree.deepest() + 1 - tree.depth;  // the tree's rows before the tails
    const int64_t* const behind = tree.list + tree.position;
    for (int64_t token = tree.size; token-- > 0;) {
      int64_t* const list = of_lists.data() + (first + token) * end;
      int64_t* const path = list + tree.position;
      const int64_t own = tree.depths[token] + 1, *const tail = tree.tails + token * tree.depth - in_place;
      row[first + token] = tree.first_row + behind[tree.rows[token]], place[first + token] = tree.position + own - 1;
      for (int64_t i = 0; i < own; ++i) path[i] = tree.first_row + behind[i < in_place ? i : tail[i]];
      common[first + token] = 0;
      if (token + 1 < tree.size) {
        int64_t* const next = path + end;
        const int64_t alike = std::mismatch(path, path + own, next).first - path;
        if (alike == own) std::copy(next + own, list + 2 * end, path + own);  // it goes on as the next one does
        common[first + token + 1] = alike == own ? end : tree.position + alike;
      }
    }
  }
};

// What tokens, whose lists are whole, see of a cache's first rows.
void fill_mask(float* mask, const Numbers& numbers, int64_t rows, int64_t window) {
  for (int64_t token = 0; token < numbers.size; ++token, mask += rows) {
    const int64_t *const list = numbers.lists + token * numbers.end, place = numbers.place[token];
    std::fill(mask, mask + rows, std::numeric_limits<float>::lowest());
    for (int64_t i = window ? std::max<int64_t>(place + 1 - window, 0) : 0; i <= place; ++i) mask[list[i]] = 0.0f;
  }
}

struct Route {  // layers in their order, and a cache for each, null for one without attention
  void* const* layers;
  void* const* caches;  // null: none has any
  int64_t count;
};

// States [1, tokens, width] behind a route's layers, contiguous; null where the code fails.
Handle run_layers(const Route& route, Handle hidden, const Trees& trees, int64_t attended) {
  const int32_t whole_numbers = aoti_torch_dtype_int64();
  std::optional<Numbers> numbers;
  Handle row, place, where, list;
  if (trees.at->list) {
    const auto reads_mask = [](const void* layer) { return static_cast<const Layer*>(layer)->code->reads_mask; };
    numbers.emplace(trees, std::any_of(route.layers, route.layers + route.count, reads_mask));
    const int64_t size = numbers->size;
    row = of_memory(numbers->row, {size}, whole_numbers);
    place = of_memory(numbers->place, {1, size}, whole_numbers);
    where = of_memory(numbers->row, {3, size}, whole_numbers);
    list = of_memory(const_cast<int64_t*>(numbers->lists), {size, numbers->end}, whole_numbers);
  }
  struct Mask {
    int64_t window;
    Handle numbers;
  };
  std::vector<Mask> masks;
  std::vector<AtenTensorHandle> inputs;
  for (int64_t i = 0; i < route.count; ++i) {
    const Layer& layer = *static_cast<const Layer*>(route.layers[i]);
    const Code& code = *layer.code;
    inputs.assign(1, code.given(std::move(hidden)));
    if (Cache* cache = static_cast<Cache*>(route.caches ? route.caches[i] : nullptr)) {
      cache->attend(attended);
      const Handle& own = code.reads_mask ? row : where;
      inputs.insert(inputs.end(), {code.lent(own), code.lent(cache->rows[0]), code.lent(cache->rows[1])});
      if (!code.reads_mask) {
        inputs.push_back(code.lent(list));
      } else if (trees.at->rows) {
        auto mask = std::find_if(masks.begin(), masks.end(), [&](Mask& m) { return m.window == cache->window; });
        if (mask == masks.end()) {
          mask = masks.insert(mask, {cache->window, new_floats({1, 1, numbers->size, attended})});
          if (!mask->numbers.at) return Handle();
          fill_mask(Seen(mask->numbers.at).floats(), *numbers, attended, cache->window);
        }
        inputs.insert(inputs.end(), {code.lent(place), code.lent(mask->numbers)});
      }
    }
    for (const Handle& weight : layer.weights) inputs.push_back(weight.another());
    if (code.run(code.container, inputs.data(), inputs.size(), &hidden.at, 1, nullptr, nullptr)) return Handle();
  }
  return hidden;
}

Handle run_layers(const Route& route, Handle hidden, const Tree& tree, int64_t attended) {
  return run_layers(route, std::move(hidden), Trees{&tree, 1}, attended);
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
