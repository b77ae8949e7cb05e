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

}  // namespace
