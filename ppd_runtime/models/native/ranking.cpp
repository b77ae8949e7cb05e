// What a boundary's head finds likeliest, for all rows of a pass in one call: between two passes each operator of PyTorch's
// takes ten microseconds and more.

#include <cmath>

#include "ranking.h"

namespace {

// What is no number comes before all numbers, as in NumPy's argmax.
inline bool is_before(float score, float other) { return score != score ? other == other : score > other; }

// The places of the `k` highest of `count` scores, at least as many; the first ones among equals.
void find_best(const float* scores, int64_t count, int64_t k, int64_t* places) {
  constexpr int64_t SOME = 64;
  int64_t found = 0;
  const auto take = [&](int64_t place) {
    if (found == k && !is_before(scores[place], scores[places[k - 1]])) return;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && is_before(scores[place], scores[places[at - 1]]); --at) places[at] = places[at - 1];
    places[at] = place;
  };
  for (int64_t i = 0; i < count; i += SOME) {
    const int64_t end = std::min(i + SOME, count);
    bool any = found < k;
    if (!any) {
      const float least = scores[places[k - 1]];
      for (int64_t j = i; j < end; ++j) any |= !(scores[j] <= least);
    }
    for (int64_t j = i; any && j < end; ++j) take(j);
  }
}

}  // namespace

// Of each of `rows` rows of `count` scores the `k` highest, best first, and the softmax of `scale` times the scores; 0 where
// that is no number. `places` and `chances` are [rows, k].
extern "C" void ppd_likeliest(
    const float* scores, int64_t rows, int64_t count, int64_t k, double scale, int64_t* places, double* chances) {
  for (int64_t row = 0; row < rows; ++row, scores += count, places += k, chances += k) {
    find_best(scores, count, k, places);
    const float most = scores[places[0]], of_most = chance_of(most, scores, count, float(scale));
    for (int64_t i = 0; i < k; ++i) {
      const double chance = of_most * std::exp(scale * (double(scores[places[i]]) - most));
      chances[i] = chance > 0 ? chance : 0;
    }
  }
}
