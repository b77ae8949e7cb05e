// Which of some scores are the highest, and how likely they are.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

// The place of the highest of `count` scores as NumPy's argmax has it: the first among equals, what is no number before all.
int64_t highest(const float* scores, int64_t count) {
  const float nothing = -std::numeric_limits<float>::infinity();
  Vec most = spread(nothing);
  Ints odd = {};
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const Vec some = load(scores + i);
    most = some > most ? some : most;
    odd |= some != some;
  }
  float all = nothing;
  bool numbers = true;
  for (int lane = 0; lane < WIDTH; ++lane) all = std::max(all, most[lane]), numbers = numbers && !odd[lane];
  for (; i < count; ++i) all = std::max(all, scores[i]), numbers = numbers && scores[i] == scores[i];
  if (numbers) return std::find(scores, scores + count, all) - scores;
  return std::find_if(scores, scores + count, [](float score) { return score != score; }) - scores;
}

// The softmax of the highest of `count` scores, which is `most`, times `scale`; no number where scores are none, or infinite.
float chance_of(float most, const float* scores, int64_t count, float scale = 1) {
  const int64_t whole = count - count % WIDTH;
  Vec rest = spread(std::numeric_limits<float>::lowest()), sum = {};
  std::memcpy(&rest, scores + whole, sizeof(float) * (count - whole));
  for (int64_t i = 0; i < whole; i += WIDTH) sum += exponential(scale * (load(scores + i) - most));
  const float all = sum_of<WIDTH>(sum + exponential(scale * (rest - most)));
  return all > 0 ? 1 / all : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace
