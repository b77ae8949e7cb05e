// As many floats as a register of this CPU holds, and sums over them whose order depends on nothing else.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

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

// A number in every lane. An added zero is no way to this: it would be added each time, for the sake of negative zeros.
inline Vec spread(float number) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(number);
#elif defined(__FMA__)
  return _mm256_set1_ps(number);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
  return vdupq_n_f32(number);
#else
  Vec numbers;
  for (int lane = 0; lane < WIDTH; ++lane) numbers[lane] = number;
  return numbers;
#endif
}

// sum + weight * state, rounded once where the CPU can. Said outright: a compiler that chooses by itself rounds once in one
// loop and twice in another (GCC does for AMD's Zen, to shorten chains of sums), and a row's bits depend on the loop.
#if defined(__AVX512F__)
inline Vec added(Vec weight, Vec state, Vec sum) { return _mm512_fmadd_ps(weight, state, sum); }
#elif defined(__FMA__)
inline Vec added(Vec weight, Vec state, Vec sum) { return _mm256_fmadd_ps(weight, state, sum); }
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
inline Vec added(Vec weight, Vec state, Vec sum) { return vfmaq_f32(sum, weight, state); }
#else
inline Vec added(Vec weight, Vec state, Vec sum) { return sum + weight * state; }
#endif

// The same for one number.
inline float added(float weight, float state, float sum) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(weight, state, sum);
#else
  return sum + weight * state;
#endif
}

// Memory for numbers that begins where a line of the caches does: a register's load from two lines takes twice as long.
class Room {
 public:
  float* of(int64_t count) {
    if (static_cast<int64_t>(memory_.size()) < count + LINE) memory_.resize(count + LINE);
    const uintptr_t place = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (-place / sizeof(float)) % LINE;
  }

 private:
  static constexpr int LINE = 64 / sizeof(float);
  std::vector<float> memory_;
};

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

// Lanes 0, STEP, 2 * STEP and so on, first.
template <int STEP>
inline Vec each_manieth(Vec numbers) {
  Vec result;
  for (int lane = 0; lane < WIDTH; ++lane) result[lane] = numbers[lane * STEP % WIDTH];
  return result;
}
#else
// Lanes that are DISTANCE apart, added: those of a in the even groups of so many lanes, those of b in the odd ones.
template <int DISTANCE>
inline Vec merged(Vec a, Vec b) {
  Ints own, other;  // a blend and a shuffle, of which a CPU may make fewer at a time
  for (int lane = 0; lane < WIDTH; ++lane) {
    const bool odd = lane / DISTANCE % 2;
    own[lane] = odd ? WIDTH + lane : lane;
    other[lane] = odd ? WIDTH + lane - DISTANCE : lane + DISTANCE;
  }
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

template <int STEP>
inline Vec each_manieth(Vec numbers) {
  Ints from;
  for (int lane = 0; lane < WIDTH; ++lane) from[lane] = lane * STEP % WIDTH;
  return __builtin_shuffle(numbers, from);
}
#endif

// e to the power of numbers that are not positive; exactly 0 below -87.
inline Vec exponential(Vec x) {
  const Vec magic = spread(12582912.0f);
  const Vec shifted = added(x, spread(1.44269504f), magic), whole = shifted - magic;
  const Vec rest = added(whole, spread(2.12194440e-4f), added(whole, spread(-0.693359375f), x));
  Vec power = spread(1.9875691500e-4f);
  power = added(power, rest, spread(1.3981999507e-3f));
  power = added(power, rest, spread(8.3334519073e-3f));
  power = added(power, rest, spread(4.1665795894e-2f));
  power = added(power, rest, spread(1.6666665459e-1f));
  power = added(power, rest, spread(5.0000001201e-1f));
  power = added(power * rest, rest, rest) + 1.0f;
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(magic)) << 23;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<Ints>(power) + exponent);
  return reinterpret_cast<Vec>((x >= -87.0f) & reinterpret_cast<Ints>(result));
}

template <int COUNT, int DISTANCE>
inline Vec merged_sums(Vec* numbers) {
  if constexpr (DISTANCE == 0) {
    return numbers[0];
  } else if constexpr (COUNT == 1) {
    numbers[0] = merged<DISTANCE>(numbers[0], numbers[0]);
    return merged_sums<1, DISTANCE / 2>(numbers);
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) numbers[i] = merged<DISTANCE>(numbers[i], numbers[i + COUNT / 2]);
    return merged_sums<COUNT / 2, DISTANCE / 2>(numbers);
  }
}

// In the first COUNT lanes the sum of each of so many vectors, as `sum_of` makes it; a power of 2, up to WIDTH. Made
// together they take a fraction of the time.
template <int COUNT>
inline Vec sums_of(Vec* numbers) {
  return each_manieth<WIDTH / COUNT>(merged_sums<COUNT, WIDTH / 2>(numbers));
}

}  // namespace
