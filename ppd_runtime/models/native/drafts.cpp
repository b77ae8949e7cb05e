// A chain of greedy drafts in one call: what lies between two passes runs in caches that the passes have emptied, and
// was a sixth of a small model's draft when Python did it.

#include <time.h>

#include "passes.h"
#include "vectors.h"

namespace {

struct Likeliest {
  int64_t token;
  float chance;  // its softmax
};

// The highest of `count` scores, the first among equals.
Likeliest likeliest(const float* scores, int64_t count) {
  const float nothing = std::numeric_limits<float>::lowest();
  const int64_t whole = count - count % WIDTH;
  Vec highest = Vec{} + nothing, rest = highest, sum = {};
  std::memcpy(&rest, scores + whole, sizeof(float) * (count - whole));
  for (int64_t i = 0; i < whole; i += WIDTH) {
    const Vec some = load(scores + i);
    highest = some > highest ? some : highest;
  }
  highest = rest > highest ? rest : highest;
  float most = highest[0];
  for (int lane = 1; lane < WIDTH; ++lane) most = std::max(most, highest[lane]);
  for (int64_t i = 0; i < whole; i += WIDTH) sum += exponential(load(scores + i) - most);
  const float all = sum_of<WIDTH>(sum + exponential(rest - most));
  const int64_t token = std::find(scores, scores + count, most) - scores;
  return {token < count ? token : 0, 1 / all};  // where nothing is a number, some token
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

}  // namespace

extern "C" {

// Draft up to `most` tokens behind `token`, which stands at `position`: each runs through `layers` and the `head`, between
// them through a part of its own where there is one. Stops behind the first one whose chance, or with `together` whose
// chain's, is below `least`. With `runs_last` the last one runs through `layers` too.
//
// The part's first pass starts with `num_unread` states [1, num_unread, width] that it has not read yet, behind the
// `part_length` that it has, and is a tree of one more tokens.
//
// For each token that ran, `states` [ran, width] are those behind `layers`, `times` [ran, 5] the seconds before them, behind
// them, behind the part, the head and the choice (these three only where a token was drafted); `spent` [4] are the sums of
// what lies between; `found` [drafted] are the tokens. The number of drafts; negative where the code fails.
int64_t ppd_draft(
    void* const* layers, void* const* caches, int64_t count,
    void* const* part, void* const* part_caches, int64_t part_count,  // 0: there is none
    void* const* for_several, void* const* for_several_caches, int64_t for_several_count,  // the part's other code
    const float* unread, int64_t num_unread, const int64_t* depths, const bool* sees, int64_t part_length,
    void* head, int64_t vocab, float* embedding, int64_t width, int64_t attended_rows, int64_t token, int64_t position,
    int64_t most, double least, bool together, bool runs_last, int64_t* found, float* states, double* times, double* spent) {
  const int32_t floats = aoti_torch_dtype_float32();
  const auto whole_rows = [=](int64_t length) { return (length + attended_rows - 1) / attended_rows * attended_rows; };
  std::vector<float> of_part;
  double chance = 1;
  std::fill(spent, spent + 4, 0.0);
  const auto note = [&](int what) { times[what + 1] = now(), spent[what] += times[what + 1] - times[what]; };
  for (int64_t drafted = 0;; ++drafted, states += width, times += 5) {
    const bool drafts = drafted < most && (drafted == 0 || chance >= least);
    if (!drafts && !runs_last) return drafted;
    times[0] = now();
    const int64_t place = position + drafted;
    Handle hidden = of_memory(embedding + token * width, {1, 1, width}, floats);
    hidden = run_layers({layers, caches, count}, std::move(hidden), {nullptr, nullptr, 1}, place, whole_rows(place + 1));
    const float* state = hidden.at ? numbers_of(hidden, width) : nullptr;
    if (!state) return -1;
    std::memcpy(states, state, width * sizeof(float));
    note(0);
    if (!drafts) return drafted;
    if (part_count && drafted == 0 && num_unread) {
      of_part.assign(unread, unread + num_unread * width);
      of_part.insert(of_part.end(), state, state + width);
      const int64_t tokens = num_unread + 1, length = part_length + tokens;
      hidden = of_memory(of_part.data(), {1, tokens, width}, floats);
      hidden = run_layers(
          {for_several, for_several_caches, for_several_count}, std::move(hidden), {depths, sees, tokens},
          part_length, whole_rows(length));
      const float* newest = hidden.at ? numbers_of(hidden, tokens * width) : nullptr;
      if (!newest) return -2;
      of_part.assign(newest + num_unread * width, newest + tokens * width);
      hidden = of_memory(of_part.data(), {1, 1, width}, floats);
    } else if (part_count) {
      const int64_t length = part_length + num_unread + drafted;
      hidden = run_layers(
          {part, part_caches, part_count}, std::move(hidden), {nullptr, nullptr, 1}, length, whole_rows(length + 1));
      if (!hidden.at) return -2;
    }
    note(1);
    hidden = run_layers({&head, nullptr, 1}, std::move(hidden), {nullptr, nullptr, 1}, 0, 0);
    const float* logits = hidden.at ? numbers_of(hidden, vocab) : nullptr;
    if (!logits) return -3;
    note(2);
    const Likeliest next = likeliest(logits, vocab);
    found[drafted] = token = next.token;
    chance = together ? chance * next.chance : next.chance;
    note(3);
  }
}

}  // extern "C"
