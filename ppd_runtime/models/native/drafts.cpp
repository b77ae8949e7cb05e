// A chain of greedy drafts, and its verification, in one call: what lies between two passes runs in caches that the passes
// have emptied, and was a sixth of a small model's draft when Python did it.

#include <time.h>

#include <cmath>

#include "packed.h"
#include "passes.h"
#include "ranking.h"

namespace {

// The chance whose log odds are `bias` and the product of two vectors of `count` numbers.
float chance_by(const float* probe, double bias, const float* state, int64_t count) {
  double odds = bias;
  for (int64_t i = 0; i < count; ++i) odds += static_cast<double>(probe[i]) * state[i];
  return 1 / (1 + std::exp(-odds));
}

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

struct Shape {  // of a chain: its tree
  std::vector<int64_t> places;

  explicit Shape(int64_t tokens) : places(tokens) {
    for (int64_t i = 0; i < tokens; ++i) places[i] = i;
  }
  Tree at(int64_t position, const int64_t* list) const {
    return {places.data(), places.data(), places.data(), static_cast<int64_t>(places.size()), 1, position, 0, list};
  }
};

// `_Chain` in drafts.py has the same members.
struct Chain {
  Route layers;             // that drafts run through, a token a pass
  Route part, part_chain;   // what they go through then, before the head: for one token, and for several; or none
  Route verify, verify_chain;  // the same of what verifies; or none
  const int64_t *list, *part_list;  // in which rows the positions of the model's sequence lie, and of the part's
  void* head;               // of drafts: a norm and a head
  void* verifying_head;
  const void* embedding;    // [.., width] in floats, or a packed matrix of so many bytes
  int64_t packed_bytes;     // 0: it is not packed
  int64_t width, vocab, attended_rows;
  int64_t extent;           // rows of the model's caches that may be read, whatever the length
  int64_t most_verified;    // tokens: more are not verified here
  bool continues;           // verification goes on behind `layers`, which the last draft runs through, too; else it starts anew
  bool together;            // it is the chance of all drafts up to one that ends the chain, not each one's
  double least;             // behind the first whose chance is not at least this, where this is finite
  const float* probe;       // [width], or null: a draft's chance is not its softmax, but that times the state plus `bias`, as
  double bias;              // log odds
  int64_t most;             // drafts
  int64_t token, position;  // what they are behind, and where it stands
  const float* unread;      // [num_unread, width]: states that the part reads in its first pass, before its first token's
  int64_t num_unread;
  int64_t part_length;      // tokens that the part has read before

  int64_t* found;           // [most]: the drafts
  int64_t* choices;         // [most + 1]: what the whole model chooses behind `token` and behind each draft; or NO_TOKEN
  float* states;            // [most + 1, width]: of each token that ran through `layers`, behind them
  double* times;            // [most + 1, 5]: of each, seconds before and behind layers, and behind part, head and choice
  double* spent;            // [4]: seconds in all layers but the part's, in the part, in heads, and in the drafts' choice
  double* verified;         // [4]: seconds before and behind verifying layers, and behind head and choice
  int64_t num_drafts, num_verified;  // the second is 0 where nothing was verified
};

constexpr int64_t NO_TOKEN = -1;  // as in highest.py

// What the first layer is given for a token, [width]; false where the embedding has no such row.
bool embed(const Chain& chain, int64_t token, float* row) {
  if (chain.packed_bytes) return ppd_rows_in_floats(chain.embedding, chain.packed_bytes, chain.width, &token, 1, row);
  std::memcpy(row, static_cast<const float*>(chain.embedding) + token * chain.width, chain.width * sizeof *row);
  return true;
}

constexpr Tree one_token(int64_t position, const int64_t* list) {
  return {nullptr, nullptr, nullptr, 1, 0, position, 0, list};
}

constexpr Tree without_texts(int64_t tokens) { return {nullptr, nullptr, nullptr, tokens, 0, 0, 0, nullptr}; }

int64_t whole_rows(const Chain& chain, int64_t length, int64_t extent = 0) {
  return (std::max(length, extent) + chain.attended_rows - 1) / chain.attended_rows * chain.attended_rows;
}

// States [1, 1, width] behind the part, of the newest state; the first pass takes in those that are unread, too.
Handle through_part(const Chain& chain, int64_t drafted, Handle hidden, std::vector<float>& memory) {
  const int32_t floats = aoti_torch_dtype_float32();
  const int64_t width = chain.width, unread = chain.num_unread, tokens = unread + 1;
  if (drafted || !unread) {
    const int64_t length = chain.part_length + unread + drafted;
    return run_layers(chain.part, std::move(hidden), one_token(length, chain.part_list), whole_rows(chain, length + 1));
  }
  const float* state = numbers_of(hidden, width);
  memory.assign(chain.unread, chain.unread + unread * width);
  memory.insert(memory.end(), state, state + width);
  hidden = of_memory(memory.data(), {1, tokens, width}, floats);
  const int64_t rows = whole_rows(chain, chain.part_length + tokens);
  hidden = run_layers(chain.part_chain, std::move(hidden), Shape(tokens).at(chain.part_length, chain.part_list), rows);
  const float* newest = hidden.at ? numbers_of(hidden, tokens * width) : nullptr;
  if (!newest) return Handle();
  memory.assign(newest + unread * width, newest + tokens * width);
  return of_memory(memory.data(), {1, 1, width}, floats);
}

// Other than 0 where the code fails.
int draft(Chain& chain) {
  const int32_t floats = aoti_torch_dtype_float32();
  const int64_t width = chain.width;
  std::vector<float> memory, embedded(width);
  int64_t token = chain.token;
  double chance = 1, *times = chain.times;
  const auto note = [&](int what) { times[what + 1] = now(), chain.spent[what] += times[what + 1] - times[what]; };
  for (int64_t& drafted = chain.num_drafts;; ++drafted, times += 5) {
    const bool doubtful = drafted && std::isfinite(chain.least) && !(chance >= chain.least);
    const bool drafts = drafted < chain.most && !doubtful;
    if (!drafts && !chain.continues) return 0;
    times[0] = now();
    const int64_t place = chain.position + drafted;
    if (!embed(chain, token, embedded.data())) return 6;
    Handle hidden = of_memory(embedded.data(), {1, 1, width}, floats);
    hidden = run_layers(chain.layers, std::move(hidden), one_token(place, chain.list), whole_rows(chain, place + 1, chain.extent));
    const float* state = hidden.at ? numbers_of(hidden, width) : nullptr;
    if (!state) return 1;
    std::memcpy(chain.states + drafted * width, state, width * sizeof(float));
    note(0);
    if (!drafts) return 0;
    if (chain.part.count) hidden = through_part(chain, drafted, std::move(hidden), memory);
    if (!hidden.at) return 2;
    note(1);
    hidden = run_layers({&chain.head, nullptr, 1}, std::move(hidden), without_texts(1), 0);
    const float* logits = hidden.at ? numbers_of(hidden, chain.vocab) : nullptr;
    if (!logits) return 3;
    note(2);
    token = chain.found[drafted] = highest(logits, chain.vocab);
    const float alone = chain.probe ? chance_by(chain.probe, chain.bias, chain.states + drafted * width, width)
                                    : chance_of(logits[token], logits, chain.vocab);
    chance = chain.together ? chance * alone : alone;
    note(3);
  }
}

// Other than 0 where the code fails.
int verify(Chain& chain) {
  const int64_t width = chain.width, tokens = chain.num_drafts + 1;
  const int32_t floats = aoti_torch_dtype_float32();
  double* times = chain.verified;
  times[0] = now();
  std::vector<float> embedded(chain.continues ? 0 : tokens * width);
  for (int64_t i = 0; i < tokens && !chain.continues; ++i)
    if (!embed(chain, i ? chain.found[i - 1] : chain.token, embedded.data() + i * width)) return 6;
  Handle hidden = of_memory(chain.continues ? chain.states : embedded.data(), {1, tokens, width}, floats);
  const Shape shape(tokens);
  hidden = run_layers(
      tokens > 1 ? chain.verify_chain : chain.verify, std::move(hidden),
      tokens > 1 ? shape.at(chain.position, chain.list) : one_token(chain.position, chain.list),
      whole_rows(chain, chain.position + tokens, chain.extent));
  if (!hidden.at) return 4;
  times[1] = now();
  hidden = run_layers({&chain.verifying_head, nullptr, 1}, std::move(hidden), without_texts(tokens), 0);
  const float* logits = hidden.at ? numbers_of(hidden, tokens * chain.vocab) : nullptr;
  if (!logits) return 5;
  times[2] = now();
  for (int64_t i = 0; i < tokens; ++i, logits += chain.vocab) {
    const int64_t place = highest(logits, chain.vocab);
    chain.choices[i] = std::isfinite(logits[place]) ? place : NO_TOKEN;
  }
  times[3] = now();
  chain.spent[0] += times[1] - times[0], chain.spent[2] += times[2] - times[1];
  chain.num_verified = tokens;
  return 0;
}

}  // namespace

extern "C" {

// Draft, and verify what was drafted. Other than 0 where the code fails.
int ppd_draft(void* of_python) {
  Chain& chain = *static_cast<Chain*>(of_python);
  chain.num_drafts = chain.num_verified = 0;
  std::fill(chain.spent, chain.spent + 4, 0.0);
  if (const int failed = draft(chain)) return failed;
  return chain.num_drafts < chain.most_verified ? verify(chain) : 0;
}

}  // extern "C"
