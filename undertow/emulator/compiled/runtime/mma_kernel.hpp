// The arithmetic of one K-step of an MMA: D (+)= A B with products and sums in double, rounded once to float.
#pragma once

#include <cstdint>

namespace undertow {

constexpr int kMaxRows = 128, kMaxColumns = 256, kDepth = 16;

// a: [k][row] with kMaxRows rows per k, b: [column][k], both 64-byte aligned. d: [column][row] with kMaxRows rows per
// column. Rows come in multiples of 32, columns in multiples of 4. `negate` changes the sign of the sum of products.
void mma_step(const double* a, const double* b, float* d, int rows, int columns, bool accumulate, bool negate);

// Elements [count] of 16 bits to double; `is_bf16`, else f16.
void widen_halves(const uint16_t* from, double* to, int count, bool is_bf16);

// from: [rows][16] elements of 16 bits; to: [16][rows].
void transpose_halves(const uint16_t* from, uint16_t* to, int rows);

}  // namespace undertow
