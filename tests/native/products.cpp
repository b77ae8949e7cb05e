// Prints what products in tiles give, as hashes: a line for each number format, form and number of tokens. Linked with
// `bfloat16.cpp` and `quantised.cpp`, and with nothing of PyTorch's, so that it runs on processors that are emulated.

#include <cstdio>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "quantised.h"

extern "C" const char* ppd_quantised_forms();
extern "C" int ppd_choose_quantised_form(const char* name);

namespace {

uint32_t state = 1;

uint32_t draw() { return state = state * 1664525u + 1013904223u, state >> 8; }

std::vector<float> states_of(int64_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = (float(draw() % 4001) - 2000) / 512 * (draw() % 9 ? 1 : 100);
  return numbers;
}

uint64_t hash_of(const std::vector<float>& numbers) {
  uint64_t hash = 14695981039346656037u;
  for (float number : numbers) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

constexpr int64_t INPUTS = 224, OUTPUTS = 5 * TILE + 3;

// A matrix of any bytes, whose scales are numbers from 2 ** -8 to 2 ** -6.
std::vector<uint8_t> packed(int bits) {
  const int64_t groups = INPUTS / GROUP, bytes = group_bytes(bits);
  std::vector<uint8_t> matrix(OUTPUTS * groups * bytes);
  for (uint8_t& byte : matrix) byte = uint8_t(draw());
  for (int64_t row = 0; row < OUTPUTS; row += TILE) {
    const int64_t rows = std::min(TILE, OUTPUTS - row);
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* scales = matrix.data() + row * groups * bytes + (g + 1) * rows * bytes - rows * SCALE_BYTES;
      for (int64_t r = 0; r < rows; ++r) {
        const uint16_t half = uint16_t(0x1c00 + draw() % 0x800);
        std::memcpy(scales + r * SCALE_BYTES, &half, sizeof half);
      }
    }
  }
  return matrix;
}

std::vector<uint16_t> halves() {
  std::vector<uint16_t> matrix(OUTPUTS * INPUTS);
  for (uint16_t& half : matrix) half = uint16_t(0x3c00 + draw() % 0x400 + (draw() % 2) * 0x8000);
  return matrix;
}

}  // namespace

int main() {
  const std::vector<uint8_t> matrices[] = {packed(8), packed(4)};
  const std::vector<uint16_t> of_halves = halves();
  for (int64_t tokens : {1, 2, 3, 5, 8, 13}) {
    const std::vector<float> states = states_of(tokens * INPUTS);
    std::vector<float> result(tokens * OUTPUTS);
    const auto products = [&](const Matrix* matrix) {
      return Products{matrix, 1, states.data(), result.data(), INPUTS, tokens, OUTPUTS};
    };
    for (int bits : {8, 4}) {
      const Matrix matrix{matrices[bits == 4].data(), OUTPUTS};
      const std::string forms = ppd_quantised_forms();
      for (size_t begin = 0, end; begin < forms.size(); begin = end + 1) {
        end = std::min(forms.find(',', begin), forms.size());
        const std::string form = forms.substr(begin, end - begin);
        if (!ppd_choose_quantised_form(form.c_str())) return 1;
        ppd_quantised_products(products(&matrix), bits);
        std::printf("int%d %s %d %016llx\n", bits, form.c_str(), int(tokens), (unsigned long long)hash_of(result));
      }
    }
    const Matrix matrix{of_halves.data(), OUTPUTS};
    ppd_bfloat16_products(products(&matrix));
    std::printf("bfloat16 vectors %d %016llx\n", int(tokens), (unsigned long long)hash_of(result));
  }
}
