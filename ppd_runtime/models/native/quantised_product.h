// What `products.cpp` calls of `quantised.cpp`.

#pragma once

#include <cstdint>

// Bits of a number in rows of so many bytes; 0 where no matrix of these inputs has such rows.
int ppd_bits_of_quantised(int64_t inputs, int64_t row_bytes);

// result [tokens, outputs] of states [tokens, inputs] and a packed matrix.
void ppd_quantised_product(
    const uint8_t* weight, int bits, const float* states, float* result, int64_t inputs, int64_t outputs, int64_t tokens);
