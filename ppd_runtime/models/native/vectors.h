// As many floats as a register of this CPU holds, and sums over them whose order depends on nothing else.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

template <int LANES>
struct Floats {
  typedef float type __attribute__((vector_size(LANES * 4)));
};
typedef Floats<WIDTH>::type Vec;
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));

inline Vec load(const float* from) {
  Vec numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}

inline void store(Vec numbers, float* to) { std::memcpy(to, &numbers, sizeof numbers); }

// sum + weight * state in the rounding of the sums of vectors, whatever becomes of the loop around.
inline float added(float weight, float state, float sum) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(weight, state, sum);
#else
  return sum + weight * state;
#endif
}

template <int LANES>
inline float sum_of(typename Floats<LANES>::type numbers) {
  if constexpr (LANES == 2) {
    return numbers[0] + numbers[1];
  } else {
    typename Floats<LANES / 2>::type low, high;
    std::memcpy(&low, &numbers, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&numbers) + sizeof low, sizeof high);
    return sum_of<LANES / 2>(low + high);
  }
}

#if defined(__clang__)
template <int DISTANCE>
inline Vec merged(Vec a, Vec b) {
  Vec result;
  for (int lane = 0; lane < WIDTH; ++lane) {
    const int from = lane / (2 * DISTANCE) * 2 * DISTANCE + lane % DISTANCE;
    result[lane] = lane / DISTANCE % 2 ? b[from] + b[from + DISTANCE] : a[from] + a[from + DISTANCE];
  }
  return result;
}
#else
// Lanes that are DISTANCE apart, added: those of a in the even groups of so many lanes, those of b in the odd ones.
template <int DISTANCE>
inline Vec merged(Vec a, Vec b) {
  Ints low;
  for (int lane = 0; lane < WIDTH; ++lane) {
    const int from = lane / (2 * DISTANCE) * 2 * DISTANCE + lane % DISTANCE;
    low[lane] = lane / DISTANCE % 2 ? WIDTH + from : from;
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + DISTANCE);
}
#endif

// The sum of each of WIDTH vectors, as `sum_of` makes it.
template <int DISTANCE = WIDTH / 2>
inline Vec sums_of(Vec* numbers) {
  if constexpr (DISTANCE == 0) {
    return numbers[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < DISTANCE; ++i) numbers[i] = merged<DISTANCE>(numbers[i], numbers[i + DISTANCE]);
    return sums_of<DISTANCE / 2>(numbers);
  }
}

}  // namespace
