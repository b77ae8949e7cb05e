// Attention of a few tokens' queries to the rows of a cache, with a mask that is added to the scores.
//
// Every sum runs over the positions of a token's text, or over the numbers of a head, in their order: the bits of a token
// depend neither on the tokens beside it, nor on the rows in which its text lies, nor on what is behind it. Rows before the
// first that a token sees are not read. Tokens of several texts, each of which begins in a row of its own, are attended to
// text by text.

#include <algorithm>

#include "tensors.h"
#include "vectors.h"

namespace {

constexpr int MOST_QUERIES = 4;                // at a time: each key and value is read once for so many
constexpr int MOST_PARTS = WIDTH == 16 ? 4 : 2;  // of a value, at a time: the sums stay in registers
constexpr float HIDDEN = -1e38f;               // what is masked adds less
constexpr int64_t GRAIN = 1 << 17;             // numbers of keys, for which a thread of its own pays

struct Heads {
  const float* at;
  int64_t of_head, of_row;  // strides
  const float* row(int64_t head, int64_t number) const { return at + head * of_head + number * of_row; }
};

struct Attention {
  Heads queries, keys, values;
  const float* mask;  // [tokens, rows]
  int64_t of_mask;    // its stride
  float* result;      // [tokens, heads, value_dim]
  float scale;
  int64_t heads, groups, tokens, dim, value_dim, rows;  // `groups` of heads share keys and values
  const int64_t* places;  // [tokens]: where each stands
  const int64_t* tails;   // [tokens, depth]: the rows of its text at the last positions before `end`
  int64_t depth, tail_end;  // the last position of a tail, and one more
  int64_t first_row;        // of the text: rows count from there on, but in tails
  int64_t begin, shared, end;  // positions that some token sees, from a multiple of WIDTH on: up to `shared` all tokens'
                               // texts lie in the rows of their positions

  int64_t row(int64_t token, int64_t position) const {  // behind `shared`
    return tails[token * depth + position - (tail_end - depth)] - first_row;
  }
};

// What a token's mask adds to its scores at the positions from `first` on; what is behind its place is hidden.
inline Vec hides_from(const Attention& a, int64_t token, const float* mask, int64_t first) {
  if (first + WIDTH <= a.shared) return load(mask + first);
  Vec hides = spread(2 * HIDDEN);
  const int64_t end = std::min({first + WIDTH, a.end, a.places[token] + 1});
  for (int64_t i = first; i < end; ++i) hides[i - first] = mask[i < a.shared ? i : a.row(token, i)];
  return hides;
}

// Scores into what their softmax is before it is divided by the sum, which is given back; they have room for a Vec more.
__attribute__((noinline)) float unscaled_softmax(const Attention& a, int64_t token, float* scores) {
  const float* mask = a.mask + token * a.of_mask;
  const int64_t whole = a.end - a.end % WIDTH, padded = a.end % WIDTH ? whole + WIDTH : whole;
  Vec highest = spread(2 * HIDDEN), sum = {};
  for (int64_t i = a.begin; i < padded; i += WIDTH) {
    const Vec score = added(load(scores + i), spread(a.scale), hides_from(a, token, mask, i));
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
  for (int64_t row = a.begin; row < a.shared; ++row) {
    const float* value = a.values.row(key_head, row) + first;
    Vec parts[PARTS];
#pragma GCC unroll 8
    for (int p = 0; p < PARTS; ++p) parts[p] = load(value + p * WIDTH);
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; ++q)
#pragma GCC unroll 8
      for (int p = 0; p < PARTS; ++p) found[q][p] = added(spread(scores[q][row]), parts[p], found[q][p]);
  }
  for (int q = 0; q < QUERIES; ++q)
    for (int p = 0; p < PARTS; ++p) store(found[q][p], results[q] + first + p * WIDTH);
}

// The values of a token's tail added to what has been found, and all divided by the scores' sum.
__attribute__((noinline)) void finish(
    const Attention& a, int64_t key_head, int64_t token, const float* scores, float sum, float* result) {
  const int64_t whole = a.value_dim - a.value_dim % WIDTH;
  for (int64_t position = a.shared; position < a.end; ++position) {
    const float* value = a.values.row(key_head, a.row(token, position));
    for (int64_t i = 0; i < whole; i += WIDTH)
      store(added(spread(scores[position]), load(value + i), load(result + i)), result + i);
    for (int64_t i = whole; i < a.value_dim; ++i) result[i] = added(scores[position], value[i], result[i]);
  }
  for (int64_t i = 0; i < a.value_dim; ++i) result[i] /= sum;
}

// The scores of NUM_ROWS rows from `row` on, of each query, which are those of the positions from `position` on; their sums
// over a head are made together.
template <int QUERIES, int NUM_ROWS>
inline void row_scores(
    const Attention& a, int64_t key_head, int64_t row, int64_t position, const float* const* queries, float* const* scores) {
  const int64_t whole = a.dim - a.dim % WIDTH;
  Vec found[WIDTH] = {};
  for (int64_t i = 0; i < whole; i += WIDTH) {
    Vec parts[NUM_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < NUM_ROWS; ++r) parts[r] = load(a.keys.row(key_head, row + r) + i);
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
        sum = added(a.keys.row(key_head, row + r)[i], queries[q][i], sum);
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
  int64_t row = a.begin;
  for (; row + NUM_ROWS <= a.shared; row += NUM_ROWS)
    row_scores<QUERIES, NUM_ROWS>(a, key_head, row, row, queries, scores);
  for (; row < a.shared; ++row) row_scores<QUERIES, 1>(a, key_head, row, row, queries, scores);
  for (int q = 0; q < QUERIES; ++q) {
    for (int64_t position = a.shared; position < a.end; ++position)
      row_scores<1, 1>(a, key_head, a.row(tokens[q], position), position, queries + q, scores + q);
    sums[q] = unscaled_softmax(a, tokens[q], scores[q]);
  }
  int64_t done = 0;
  for (; done + MOST_PARTS * WIDTH <= a.value_dim; done += MOST_PARTS * WIDTH)
    value_parts<QUERIES, MOST_PARTS>(a, key_head, done, scores, results);
  for (; done + WIDTH <= a.value_dim; done += WIDTH) value_parts<QUERIES, 1>(a, key_head, done, scores, results);
  for (; done < a.value_dim; ++done)
    for (int q = 0; q < QUERIES; ++q) {
      float found = 0;
      for (int64_t row = a.begin; row < a.shared; ++row)
        found = added(scores[q][row], a.values.row(key_head, row)[done], found);
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

bool is_seen(const Attention& a, int64_t row) {
  for (int64_t token = 0; token < a.tokens; ++token)
    if (a.mask[token * a.of_mask + row] > HIDDEN) return true;
  return false;
}

bool lies_in_place(const Attention& a, int64_t position) {
  for (int64_t token = 0; token < a.tokens; ++token)
    if (a.places[token] >= position && a.row(token, position) != position) return false;
  return true;
}

// Where a token's text begins: in the first row, but where a tail says where all of it lies.
int64_t first_row_of(const Attention& a, int64_t token) { return a.depth == a.tail_end ? a.tails[token * a.depth] : 0; }

// Tokens `first` and `size - 1` after it, which are of one text.
Attention of_text(Attention a, int64_t first, int64_t size) {
  const int64_t row = first_row_of(a, first);
  a.queries.at += first * a.queries.of_row;
  a.keys.at += row * a.keys.of_row;
  a.values.at += row * a.values.of_row;
  a.mask += first * a.of_mask + row;
  a.result += first * a.heads * a.value_dim;
  a.places += first, a.tails += first * a.depth;
  a.tokens = size, a.rows -= row, a.first_row = row;
  a.end = *std::max_element(a.places, a.places + size) + 1;
  a.shared = std::min(a.tail_end - a.depth, a.end);
  while (a.shared < a.end && lies_in_place(a, a.shared)) ++a.shared;
  while (a.begin < std::min(a.shared, a.end - 1) && !is_seen(a, a.begin)) ++a.begin;
  return a;
}

// Whether tails and places lie within the cache.
bool lies_within(const Attention& a) {
  if (a.tail_end < a.depth || a.tail_end > a.rows) return false;
  for (int64_t i = 0; i < a.tokens * a.depth; ++i)
    if (a.tails[i] < 0 || a.tails[i] >= a.rows) return false;
  for (int64_t token = 0; token < a.tokens; ++token)
    if (first_row_of(a, token) + a.places[token] >= a.rows) return false;
  return true;
}

void attend(Attention a) {
  a.begin -= a.begin % WIDTH;
  const int64_t numbers = (a.end - a.begin) * (a.dim + a.value_dim) * a.groups * a.tokens;
  for_all(a.heads / a.groups, std::max<int64_t>(1, GRAIN / std::max<int64_t>(numbers, 1)), some_heads, &a);
}

}  // namespace

// result [1, tokens, heads, value_dim] of queries [1, heads, tokens, dim], keys [1, key_heads, rows, dim], values
// [1, key_heads, rows, value_dim] and a mask [1, 1, tokens, rows], in float32; places [1, tokens] and tails [tokens, depth].
extern "C" AOTITorchError aoti_torch_cpu_few_tokens_attention(
    AtenTensorHandle queries, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle mask,
    AtenTensorHandle places, AtenTensorHandle tails, double scale, AtenTensorHandle* result) {
  const Seen q(queries), k(keys), v(values), m(mask), p(places), t(tails);
  if (!(q.has_rows() && k.has_rows() && v.has_rows() && m.has_rows())) return AOTI_TORCH_FAILURE;
  if (!(p.is_whole_matrix() && t.is_whole_matrix())) return AOTI_TORCH_FAILURE;
  const int64_t heads = q.sizes[1], tokens = q.sizes[2], key_heads = k.sizes[1], rows = k.sizes[2];
  const bool fits = key_heads > 0 && heads % key_heads == 0 && v.sizes[1] == key_heads && v.sizes[2] == rows &&
      k.sizes[3] == q.sizes[3] && m.sizes[1] == 1 && m.sizes[2] == tokens && m.sizes[3] == rows && rows > 0 &&
      p.sizes[0] == 1 && p.sizes[1] == tokens && tokens > 0 && t.sizes[0] == tokens;
  if (!fits) return AOTI_TORCH_FAILURE;
  Attention attention{
      {q.floats(), q.strides[1], q.strides[2]}, {k.floats(), k.strides[1], k.strides[2]},
      {v.floats(), v.strides[1], v.strides[2]}, m.floats(), m.strides[2], nullptr,
      static_cast<float>(scale),
      heads, heads / key_heads, tokens, q.sizes[3], v.sizes[3], rows,
      p.whole_numbers(), t.whole_numbers(), t.sizes[1], 0, 0, 0, 0, 0};
  attention.tail_end = *std::max_element(attention.places, attention.places + tokens) + 1;
  if (!lies_within(attention)) return AOTI_TORCH_FAILURE;
  const int64_t sizes[] = {1, tokens, heads, v.sizes[3]};
  const int64_t strides[] = {tokens * heads * v.sizes[3], heads * v.sizes[3], v.sizes[3], 1};
  const AOTITorchError error = floats_like(queries, 4, sizes, strides, result);
  if (error != AOTI_TORCH_SUCCESS) return error;
  attention.result = Seen(*result).floats();
  for (int64_t first = 0, next; first < tokens; first = next) {
    for (next = first + 1; next < tokens && first_row_of(attention, next) == first_row_of(attention, first);) ++next;
    attend(of_text(attention, first, next - first));
  }
  return AOTI_TORCH_SUCCESS;
}
