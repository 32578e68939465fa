// Compiled with contraction allowed: a product of two operands of at most 11 significant bits is exact in double, so a
// fused multiply-add gives the same bits as a product and a sum. The order of the sum over k is ascending from +0.
#include "mma_kernel.hpp"

#include "lanes.hpp"

namespace undertow {

namespace {

#ifdef __AVX512F__
constexpr int kWidth = 8, kTileVectors = 4, kTileColumns = 4;
#else
constexpr int kWidth = 4, kTileVectors = 2, kTileColumns = 4;
#endif
constexpr int kTileRows = kWidth * kTileVectors;
static_assert(kLanes % kTileRows == 0, "rows come in multiples of 32");

typedef double Doubles __attribute__((vector_size(kWidth * sizeof(double))));
typedef float Floats __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));

// kTileRows by kTileColumns of the result, held in registers.
inline void tile(const double* a, const double* b, float* d, bool accumulate, bool negate) {
    Doubles sum[kTileColumns][kTileVectors] = {};
    for (int k = 0; k < kDepth; ++k) {
        Doubles rows[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v) {
            rows[v] = *reinterpret_cast<const Doubles*>(a + k * kMaxRows + v * kWidth);
        }
        for (int n = 0; n < kTileColumns; ++n) {
            for (int v = 0; v < kTileVectors; ++v) sum[n][v] += rows[v] * b[n * kDepth + k];
        }
    }
    for (int n = 0; n < kTileColumns; ++n) {
        for (int v = 0; v < kTileVectors; ++v) {
            Floats* place = reinterpret_cast<Floats*>(d + n * kMaxRows + v * kWidth);
            Doubles value = negate ? -sum[n][v] : sum[n][v];
            if (accumulate) value += __builtin_convertvector(*place, Doubles);
            *place = __builtin_convertvector(value, Floats);
        }
    }
}

}  // namespace

void mma_step(const double* a, const double* b, float* d, int rows, int columns, bool accumulate, bool negate) {
    for (int m = 0; m < rows; m += kTileRows) {
        for (int n = 0; n < columns; n += kTileColumns) {
            tile(a + m, b + n * kDepth, d + n * kMaxRows + m, accumulate, negate);
        }
    }
}

void widen_halves(const uint16_t* from, double* to, int count, bool is_bf16) {
    if (is_bf16) {
        for (int i = 0; i < count; ++i) to[i] = double(bf16_to_f32(from[i]));
    } else {
        for (int i = 0; i < count; ++i) to[i] = double(f16_to_f32(from[i]));
    }
}

void transpose_halves(const uint16_t* from, uint16_t* to, int rows) {
    for (int block = 0; block < rows; block += 8) {
        for (int k = 0; k < 16; ++k) {
            for (int r = 0; r < 8; ++r) to[k * rows + block + r] = from[(block + r) * 16 + k];
        }
    }
}

}  // namespace undertow
