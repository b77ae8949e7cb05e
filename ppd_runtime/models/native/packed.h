// What others ask of packed matrices, which `quantised.h` describes.

#pragma once

#include <cstdint>

// Rows of a packed matrix in floats, `result` [count, inputs]; 0 where it is none with these inputs, or has no such row.
extern "C" int ppd_rows_in_floats(
    const void* packed, int64_t num_bytes, int64_t inputs, const int64_t* rows, int64_t count, float* result);
