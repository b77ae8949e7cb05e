// Attention of a few tokens' queries to the rows of a cache in which their texts lie.
//
// Every sum runs over the positions of a token's text, or over the numbers of a head, in their order: the bits of a token
// depend neither on the tokens beside it, nor on the rows in which its text lies, nor on what is behind it. Rows before the
// first that a token sees are not read. Tokens whose texts begin alike are attended to together: what they have in common is
// read once for several.

#include <algorithm>
#include <limits>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int MOST_QUERIES = 4;                // at a time: each key and value is read once for so many
constexpr int MOST_PARTS = WIDTH == 16 ? 4 : 2;  // of a value, at a time: the sums stay in registers
constexpr float UNSEEN = -2e38f;               // the score of what a token does not see
constexpr int64_t GRAIN = 1 << 17;             // numbers of keys, for which a thread of its own pays

struct Heads {
  const float* at;
  int64_t of_head, of_row;  // strides
  const float* row(int64_t head, int64_t number) const { return at + head * of_head + number * of_row; }
};

struct Attention {
  Heads queries, keys, values;
  float* result;  // [tokens, heads, value_dim]
  float scale;
  int64_t heads, groups, tokens, dim, value_dim, rows;  // `groups` of heads share keys and values
  const int64_t* places;  // [tokens]: where each stands
  const int64_t* lists;   // [tokens, of_list]: in which rows the positions of its text lie, up to its place
  int64_t of_list, window;     // how many positions before its next one a token sees
  int64_t begin, shared, end;  // positions that some token sees, from a multiple of WIDTH on: up to `shared` the texts of all
                               // lie in the same rows, which the first one's list names alone
  int64_t straight;            // up to which of the shared ones the rows follow each other

  int64_t row(int64_t token, int64_t position) const { return lists[token * of_list + position]; }  // behind `shared`
  int64_t oldest(int64_t token) const { return std::max<int64_t>(places[token] + 1 - window, 0); }
};

// A token's scores at the positions from `first` on, scaled; what it does not see is far below.
inline Vec scaled(const Attention& a, int64_t token, const float* scores, int64_t first) {
  Vec found = added(load(scores + first), spread(a.scale), Vec{});
  const int64_t oldest = a.oldest(token), place = a.places[token];
  if (first < oldest || first + WIDTH > place + 1)
    for (int lane = 0; lane < WIDTH; ++lane)
      if (first + lane < oldest || first + lane > place) found[lane] = UNSEEN;
  return found;
}

// Scores into what their softmax is before it is divided by the sum, which is given back; they have room for a Vec more.
__attribute__((noinline)) float unscaled_softmax(const Attention& a, int64_t token, float* scores) {
  const int64_t whole = a.end - a.end % WIDTH, padded = a.end % WIDTH ? whole + WIDTH : whole;
  Vec highest = spread(UNSEEN), sum = {};
  for (int64_t i = a.begin; i < padded; i += WIDTH) {
    const Vec score = scaled(a, token, scores, i);
    store(score, scores + i);
    highest = score > highest ? score : highest;
  }
  float most = highest[0];
  for (int lane = 1; lane < WIDTH; ++lane) most = std::max(most, highest[lane]);
  for (int64_t i = a.begin; i < padded; i += WIDTH) {
    const Vec share = exponential(load(scores + i) - most);
    store(share, scores + i);
    sum += share;
  }
  return sum_of<WIDTH>(sum);
}

// Of the values in the shared rows, WIDTH * PARTS numbers from `first` on.
template <int QUERIES, int PARTS>
inline void value_parts(
    const Attention& a, int64_t key_head, int64_t first, float* const* scores, float* const* results) {
  Vec found[QUERIES][PARTS] = {};
  const float* value = nullptr;
  for (int64_t position = a.begin; position < a.shared; ++position) {
    const bool follows = QUERIES <= 2 && position > a.begin && position < a.straight;  // for several a step takes longer
    value = follows ? value + a.values.of_row : a.values.row(key_head, a.lists[position]) + first;
    Vec parts[PARTS];
#pragma GCC unroll 8
    for (int p = 0; p < PARTS; ++p) parts[p] = load(value + p * WIDTH);
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 8
      for (int p = 0; p < PARTS; ++p) found[q][p] = added(spread(scores[q][position]), parts[p], found[q][p]);
  }
  for (int q = 0; q < QUERIES; ++q)
    for (int p = 0; p < PARTS; ++p) store(found[q][p], results[q] + first + p * WIDTH);
}

// The values of a token's tail added to what has been found, and all divided by the scores' sum.
__attribute__((noinline)) void finish(
    const Attention& a, int64_t key_head, int64_t token, const float* scores, float sum, float* result) {
  const int64_t whole = a.value_dim - a.value_dim % WIDTH;
  for (int64_t position = a.shared; position <= a.places[token]; ++position) {
    const float* value = a.values.row(key_head, a.row(token, position));
    for (int64_t i = 0; i < whole; i += WIDTH)
      store(added(spread(scores[position]), load(value + i), load(result + i)), result + i);
    for (int64_t i = whole; i < a.value_dim; ++i) result[i] = added(scores[position], value[i], result[i]);
  }
  for (int64_t i = 0; i < a.value_dim; ++i) result[i] /= sum;
}

// The scores of NUM_ROWS positions from `position` on, of each query, which lie in these rows; their sums over a head are made
// together.
template <int QUERIES, int NUM_ROWS>
inline void row_scores(
    const Attention& a, int64_t key_head, const int64_t* rows, int64_t position, const float* const* queries,
    float* const* scores) {
  const float* keys[NUM_ROWS];
  const bool is_straight = position + NUM_ROWS <= a.straight;
  keys[0] = a.keys.row(key_head, rows[0]);
#pragma GCC unroll 16
  for (int r = 1; r < NUM_ROWS; ++r) keys[r] = is_straight ? keys[r - 1] + a.keys.of_row : a.keys.row(key_head, rows[r]);
  const int64_t whole = a.dim - a.dim % WIDTH;
  Vec found[WIDTH] = {};
  for (int64_t i = 0; i < whole; i += WIDTH) {
    Vec parts[NUM_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < NUM_ROWS; ++r) parts[r] = load(keys[r] + i);
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q) {
      const Vec query = load(queries[q] + i);
#pragma GCC unroll 16
      for (int r = 0; r < NUM_ROWS; ++r) found[q * NUM_ROWS + r] = added(parts[r], query, found[q * NUM_ROWS + r]);
    }
  }
  float sums[WIDTH];
  store(sums_of<WIDTH>(found), sums);
  for (int64_t i = whole; i < a.dim; ++i)
    for (int q = 0; q < QUERIES; ++q)
      for (int r = 0; r < NUM_ROWS; ++r) {
        float& sum = sums[q * NUM_ROWS + r];
        sum = added(keys[r][i], queries[q][i], sum);
      }
#pragma GCC unroll 8
  for (int q = 0; q < QUERIES; ++q) std::memcpy(scores[q] + position, sums + q * NUM_ROWS, sizeof(float) * NUM_ROWS);
}

// Queries `first` and those after it of the heads that share key_head; query q is of head q / tokens, token q % tokens.
template <int QUERIES>
void some_queries(const Attention& a, int64_t key_head, int64_t first, float* memory) {
  constexpr int NUM_ROWS = WIDTH / (QUERIES == 3 ? 4 : QUERIES);
  const int64_t room = a.end + WIDTH;
  int64_t tokens[QUERIES];
  const float* queries[QUERIES];
  float *scores[QUERIES], *results[QUERIES], sums[QUERIES];
  for (int q = 0; q < QUERIES; ++q) {
    const int64_t head = key_head * a.groups + (first + q) / a.tokens, token = (first + q) % a.tokens;
    tokens[q] = token;
    queries[q] = a.queries.row(head, token);
    results[q] = a.result + (token * a.heads + head) * a.value_dim;
    scores[q] = memory + q * room;
  }
  int64_t position = a.begin;
  for (; position + NUM_ROWS <= a.shared; position += NUM_ROWS)
    row_scores<QUERIES, NUM_ROWS>(a, key_head, a.lists + position, position, queries, scores);
  for (; position < a.shared; ++position)
    row_scores<QUERIES, 1>(a, key_head, a.lists + position, position, queries, scores);
  for (int q = 0; q < QUERIES; ++q) {
    const int64_t* list = a.lists + tokens[q] * a.of_list;
    for (int64_t own = a.shared; own <= a.places[tokens[q]]; ++own)
      row_scores<1, 1>(a, key_head, list + own, own, queries + q, scores + q);
    sums[q] = unscaled_softmax(a, tokens[q], scores[q]);
  }
  int64_t done = 0;
  for (; done + MOST_PARTS * WIDTH <= a.value_dim; done += MOST_PARTS * WIDTH)
    value_parts<QUERIES, MOST_PARTS>(a, key_head, done, scores, results);
  for (; done + WIDTH <= a.value_dim; done += WIDTH) value_parts<QUERIES, 1>(a, key_head, done, scores, results);
  for (; done < a.value_dim; ++done)
    for (int q = 0; q < QUERIES; ++q) {
      float found = 0;
      for (int64_t shared = a.begin; shared < a.shared; ++shared)
        found = added(scores[q][shared], a.values.row(key_head, a.lists[shared])[done], found);
      results[q][done] = found;
    }
  for (int q = 0; q < QUERIES; ++q) finish(a, key_head, tokens[q], scores[q], sums[q], results[q]);
}

void some_heads(int64_t key_head, int64_t end, void* context) {
  const Attention& a = *static_cast<const Attention*>(context);
  static thread_local Room room;
  float* memory = room.of(MOST_QUERIES * (a.end + WIDTH));
  for (; key_head < end; ++key_head)
    for (int64_t first = 0, all = a.groups * a.tokens; first < all; first += MOST_QUERIES)
      switch (std::min<int64_t>(MOST_QUERIES, all - first)) {
        case 1: some_queries<1>(a, key_head, first, memory); break;
        case 2: some_queries<2>(a, key_head, first, memory); break;
        case 3: some_queries<3>(a, key_head, first, memory); break;
        case 4: some_queries<4>(a, key_head, first, memory); break;
      }
}

// Tokens `first` and `size - 1` after it, whose texts have the first `shared` positions in common.
Attention of_texts(Attention a, int64_t first, int64_t size, int64_t shared) {
  a.queries.at += first * a.queries.of_row;
  a.result += first * a.heads * a.value_dim;
  a.places += first, a.lists += first * a.of_list;
  a.tokens = size;
  a.end = *std::max_element(a.places, a.places + size) + 1;
  a.shared = std::min(shared, a.end);
  a.begin = a.shared;
  for (int64_t token = 0; token < size; ++token) a.begin = std::min(a.begin, a.oldest(token));
  a.begin -= a.begin % WIDTH;
  a.straight = a.begin;
  while (a.straight < a.shared && a.lists[a.straight] == a.lists[a.begin] + a.straight - a.begin) ++a.straight;
  return a;
}

bool are_rows(const Attention& a, int64_t token, int64_t begin, int64_t end) {
  int64_t least = 0, most = 0;
  for (int64_t position = begin; position < end; ++position)
    least = std::min(least, a.row(token, position)), most = std::max(most, a.row(token, position));
  return least >= 0 && most < a.rows;
}

// Whether what is read lies within the cache.
bool lies_within(const Attention& a) {
  if (!are_rows(a, 0, a.begin, a.shared)) return false;
  for (int64_t token = 0; token < a.tokens; ++token)
    if (!are_rows(a, token, a.shared, a.places[token] + 1)) return false;
  return true;
}

bool attend(Attention a) {
  const int64_t numbers = (a.end - a.begin) * (a.dim + a.value_dim) * a.groups * a.tokens;
  for_all(a.heads / a.groups, std::max<int64_t>(1, GRAIN / std::max<int64_t>(numbers, 1)), some_heads, &a);
  return true;
}

}  // namespace

// result [1, tokens, heads, value_dim] of queries [1, heads, tokens, dim], keys [1, key_heads, rows, dim] and values
// [1, key_heads, rows, value_dim], in float32; lists [tokens, positions], and where [3, tokens], of which the second are the
// tokens' places, and the third what a list has in common with the one before. A window of 0 is none.
extern "C" AOTITorchError aoti_torch_cpu_few_tokens_attention(
    AtenTensorHandle queries, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle where,
    AtenTensorHandle lists, double scale, double window, AtenTensorHandle* result) {
  const Seen q(queries), k(keys), v(values), w(where), l(lists);
  if (!(q.has_rows() && k.has_rows() && v.has_rows() && w.is_whole_matrix() && l.is_whole_matrix())) return AOTI_TORCH_FAILURE;
  const int64_t heads = q.sizes[1], tokens = q.sizes[2], key_heads = k.sizes[1], rows = k.sizes[2];
  const bool fits = key_heads > 0 && heads % key_heads == 0 && v.sizes[1] == key_heads && v.sizes[2] == rows &&
      k.sizes[3] == q.sizes[3] && tokens > 0 && w.sizes[0] == 3 && w.sizes[1] == tokens && l.sizes[0] == tokens;
  if (!fits) return AOTI_TORCH_FAILURE;
  Attention attention{
      {q.floats(), q.strides[1], q.strides[2]}, {k.floats(), k.strides[1], k.strides[2]},
      {v.floats(), v.strides[1], v.strides[2]}, nullptr,
      static_cast<float>(scale),
      heads, heads / key_heads, tokens, q.sizes[3], v.sizes[3], rows,
      w.whole_numbers() + tokens, l.whole_numbers(), l.sizes[1],
      window > 0 ? static_cast<int64_t>(window) : std::numeric_limits<int64_t>::max(), 0, 0, 0, 0};
  for (int64_t token = 0; token < tokens; ++token)
    if (attention.places[token] < 0 || attention.places[token] >= attention.of_list) return AOTI_TORCH_FAILURE;
  const auto over_parts = [&](auto&& does) {
    const int64_t* const alike = w.whole_numbers() + 2 * tokens;
    bool all = true;
    for (int64_t first = 0, next; all && first < tokens; first = next) {
      int64_t shared = std::numeric_limits<int64_t>::max();
      for (next = first + 1; next < tokens && alike[next] > 0; ++next) shared = std::min(shared, alike[next]);
      all = does(of_texts(attention, first, next - first, shared));
    }
    return all;
  };
  if (!over_parts(lies_within)) return AOTI_TORCH_FAILURE;
  const int64_t sizes[] = {1, tokens, heads, v.sizes[3]};
  const int64_t strides[] = {tokens * heads * v.sizes[3], heads * v.sizes[3], v.sizes[3], 1};
  const AOTITorchError error = floats_like(queries, 4, sizes, strides, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  attention.result = Seen(*result).floats();
  over_parts(attend);
  return AOTI_TORCH_SUCCESS;
}
