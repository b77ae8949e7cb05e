// A drafter's pass over a few tokens, and the likeliest of its logits, in one call each: what PyTorch does between the
// products took more than half of a draft's time.
//
// `DrafterNetwork` in trained/drafter.py says what is computed; `_Network` in drafter.py has the same members.

#include <cmath>

#include "ranking.h"
#include "tiled_products.h"
#include "vectors.h"

namespace {

constexpr int64_t HEAD_DIM = 64;  // of a multiple of WIDTH, as are sizes, which are multiples of 32
constexpr float EPSILON = 1.1920928955078125e-7f;

struct Weight {
  const void* packed;
  int64_t num_bytes;
  const float* bias;  // or null
};

struct Network {
  Weight mix, query_key_value, out, gate_up, down, head;
  const float* norm;        // [size], of the head
  double epsilon;           // of that norm
  int64_t size, heads, inner, shortlist;
  int64_t capacity;         // rows
  float *keys, *values;     // [heads, capacity, HEAD_DIM]
  float* states;            // [capacity, size]
  const float *cos, *sin;   // [capacity, HEAD_DIM / 2]
};

// Tokens that are run together. Each sees the first `seen` rows, and the rows of its path, of which the last is its own.
struct Tokens {
  int64_t count, depth;
  const float* embedded;    // [count, size]
  const float* before;      // [count, size], or null: `parents` are the rows of the states before them
  const int64_t* parents;   // [count]
  const int64_t* places;    // [count]: the position of each
  const int64_t* rows;      // [count]: where its entries and its state go
  const int64_t* seen;      // [count]
  const int64_t* paths;     // [count, depth]
};

// False where the matrix has another shape.
bool multiply(const Weight& weight, const float* states, int64_t tokens, int64_t inputs, int64_t outputs, float* result) {
  const Matrix matrix = ppd_packed_matrix(weight.packed, weight.num_bytes, inputs);
  if (!matrix.at || matrix.outputs != outputs) return false;
  ppd_quantised_products({&matrix, 1, states, result, inputs, tokens, outputs});
  for (int64_t token = 0; weight.bias && token < tokens; ++token)
    for (int64_t i = 0; i < outputs; ++i) result[token * outputs + i] += weight.bias[i];
  return true;
}

// Scaled to unit size, and by `weight` where it is not null.
void norm(const float* from, int64_t size, float epsilon, const float* weight, float* to) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += WIDTH) squares = added(load(from + i), load(from + i), squares);
  const float scale = 1.0f / std::sqrt(sum_of<WIDTH>(squares) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += WIDTH)
    store(weight ? load(from + i) * scale * load(weight + i) : load(from + i) * scale, to + i);
}

void turn(const float* from, const float* cos, const float* sin, float* to) {
  constexpr int64_t HALF = HEAD_DIM / 2;
  for (int64_t i = 0; i < HALF; i += WIDTH) {
    const Vec first = load(from + i), second = load(from + HALF + i), c = load(cos + i), s = load(sin + i);
    store(first * c - second * s, to + i), store(second * c + first * s, to + HALF + i);
  }
}

// What a head finds in the rows that a token sees; `scores` has room for one of each.
void attend(const Network& network, const Tokens& tokens, int64_t token, int64_t head, const float* query, float* scores, float* found) {
  const int64_t seen = tokens.seen[token], all = seen + tokens.depth, *path = tokens.paths + token * tokens.depth;
  const float* keys = network.keys + head * network.capacity * HEAD_DIM;
  const float* values = network.values + head * network.capacity * HEAD_DIM;
  const auto row = [&](int64_t i) { return (i < seen ? i : path[i - seen]) * HEAD_DIM; };
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < all; ++i) {
    Vec product = {};
    const float* key = keys + row(i);
#pragma GCC unroll 4
    for (int64_t d = 0; d < HEAD_DIM; d += WIDTH) product = added(load(key + d), load(query + d), product);
    scores[i] = sum_of<WIDTH>(product) / 8.0f;  // the root of HEAD_DIM
    most = std::max(most, scores[i]);
  }
  constexpr int64_t PARTS = HEAD_DIM / WIDTH;
  Vec parts[PARTS] = {};
  for (int64_t i = 0; i < all; i += WIDTH) {
    Vec some = spread(-std::numeric_limits<float>::infinity());
    const int64_t lanes = std::min<int64_t>(WIDTH, all - i);
    std::memcpy(&some, scores + i, lanes * sizeof(float));
    const Vec shares = exponential(some - most);
    sum += sum_of<WIDTH>(shares);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const float* value = values + row(i + lane);
#pragma GCC unroll 16
      for (int64_t p = 0; p < PARTS; ++p) parts[p] = added(spread(shares[lane]), load(value + p * WIDTH), parts[p]);
    }
  }
  for (int64_t p = 0; p < PARTS; ++p) store(parts[p] / sum, found + p * WIDTH);
}

// gate / (1 + e ** -gate) * up
Vec gated(Vec gate, Vec up) {
  const Vec share = exponential(gate > 0.0f ? -gate : gate);
  return gate * (gate > 0.0f ? spread(1.0f) : share) / (1.0f + share) * up;
}

void add(const float* more, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += WIDTH) store(load(to + i) + load(more + i), to + i);
}

bool are_within(const Network& network, const Tokens& tokens) {
  const auto is_row = [&](int64_t row) { return row >= 0 && row < network.capacity; };
  for (int64_t token = 0; token < tokens.count; ++token) {
    if (!is_row(tokens.places[token]) || !is_row(tokens.rows[token])) return false;
    if (!tokens.before && !is_row(tokens.parents[token])) return false;
    if (tokens.seen[token] < 0 || tokens.seen[token] > network.capacity || tokens.seen[token] + tokens.depth == 0) return false;
  }
  return std::all_of(tokens.paths, tokens.paths + tokens.count * tokens.depth, is_row);
}

}  // namespace

extern "C" {

// Entries and states of tokens; other than 0 where numbers do not fit.
int ppd_drafter_tokens(const void* of_network, const void* of_tokens) {
  const Network& network = *static_cast<const Network*>(of_network);
  const Tokens& tokens = *static_cast<const Tokens*>(of_tokens);
  if (!are_within(network, tokens)) return 1;
  const int64_t count = tokens.count, size = network.size, wide = network.heads * HEAD_DIM, inner = network.inner;
  static thread_local Room rooms[7];
  float* const joined = rooms[0].of(count * 2 * size);
  float* const hidden = rooms[1].of(count * size);
  float* const normal = rooms[2].of(count * size);
  float* const parts = rooms[3].of(count * 3 * wide);
  float* const found = rooms[4].of(count * wide);
  float* const gates = rooms[5].of(count * std::max(2 * inner, size));
  float* const scores = rooms[6].of(network.capacity + tokens.depth + WIDTH);
  const auto norm_all = [&] {
    for (int64_t token = 0; token < count; ++token)
      norm(hidden + token * size, size, EPSILON, nullptr, normal + token * size);
  };
  for (int64_t token = 0; token < count; ++token) {
    const float* before = tokens.before ? tokens.before + token * size : network.states + tokens.parents[token] * size;
    norm(tokens.embedded + token * size, size, EPSILON, nullptr, joined + 2 * token * size);
    norm(before, size, EPSILON, nullptr, joined + (2 * token + 1) * size);
  }
  if (!multiply(network.mix, joined, count, 2 * size, size, hidden)) return 2;
  norm_all();
  if (!multiply(network.query_key_value, normal, count, size, 3 * wide, parts)) return 3;
  for (int64_t token = 0; token < count; ++token)
    for (int64_t head = 0; head < network.heads; ++head) {
      float* const query = parts + token * 3 * wide + head * HEAD_DIM;
      const float *cos = network.cos + tokens.places[token] * (HEAD_DIM / 2), *sin = network.sin + tokens.places[token] * (HEAD_DIM / 2);
      const int64_t entry = (head * network.capacity + tokens.rows[token]) * HEAD_DIM;
      turn(query, cos, sin, query);
      turn(query + wide, cos, sin, network.keys + entry);
      std::memcpy(network.values + entry, query + 2 * wide, HEAD_DIM * sizeof(float));
    }
  for (int64_t token = 0; token < count; ++token)
    for (int64_t head = 0; head < network.heads; ++head) {
      const int64_t of_head = head * HEAD_DIM;
      attend(network, tokens, token, head, parts + token * 3 * wide + of_head, scores, found + token * wide + of_head);
    }
  if (!multiply(network.out, found, count, wide, size, gates)) return 4;
  add(gates, count * size, hidden);
  norm_all();
  if (!multiply(network.gate_up, normal, count, size, 2 * inner, gates)) return 5;
  for (int64_t token = 0; token < count; ++token)
    for (int64_t i = 0; i < inner; i += WIDTH) {
      const float* const gate = gates + 2 * token * inner + i;
      store(gated(load(gate), load(gate + inner)), gates + token * inner + i);
    }
  if (!multiply(network.down, gates, count, inner, size, normal)) return 6;
  add(normal, count * size, hidden);
  for (int64_t token = 0; token < count; ++token)
    std::memcpy(network.states + tokens.rows[token] * size, hidden + token * size, size * sizeof(float));
  return 0;
}

// Logits [count, shortlist] of states in rows; other than 0 where numbers do not fit.
int ppd_drafter_logits(const void* of_network, const int64_t* rows, int64_t count, float* result) {
  const Network& network = *static_cast<const Network*>(of_network);
  static thread_local Room room;
  float* const normal = room.of(count * network.size);
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= network.capacity) return 1;
    norm(network.states + rows[i] * network.size, network.size, float(network.epsilon), network.norm, normal + i * network.size);
  }
  return multiply(network.head, normal, count, network.size, network.shortlist, result) ? 0 : 2;
}

// The places of the k highest of `count` scores, the first among equals, and their shares of the softmax of `scale` times
// all; 0 where the highest is no finite number, which stands for all that is none. 0 < k <= count.
void ppd_likeliest(const float* scores, int64_t count, int64_t k, float scale, int64_t* places, double* chances) {
  constexpr float INFINITE = std::numeric_limits<float>::infinity();
  const auto key = [&](int64_t place) { return scores[place] == scores[place] ? scores[place] : INFINITE; };
  int64_t filled = 0;
  float least = -INFINITE;
  for (int64_t i = 0; i < count; ++i) {
    if (filled == k && scores[i] <= least) continue;  // not where it is no number
    const float own = key(i);
    if (filled == k && own <= least) continue;
    int64_t at = filled < k ? filled++ : k - 1;
    for (; at > 0 && key(places[at - 1]) < own; --at) places[at] = places[at - 1];
    places[at] = i, least = key(places[filled - 1]);
  }
  const float most = key(places[0]);
  const double first = std::isfinite(most) ? chance_of(most, scores, count, scale) : 0.0;
  for (int64_t i = 0; i < k; ++i)
    chances[i] = first > 0 ? first * std::exp(double(scale) * (double(scores[places[i]]) - most)) : 0.0;
}

}  // extern "C"
