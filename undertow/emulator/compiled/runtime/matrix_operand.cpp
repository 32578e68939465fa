#include "matrix_operand.hpp"

#include <algorithm>
#include <cstring>

namespace undertow {

using ull = unsigned long long;

namespace {

// Reads an (extent, 16) operand of 16-bit elements in 16-byte chunks, which no swizzle tears apart. `halves` is
// [extent][16] for a K-major operand and [16][extent] for an MN-major one: the order in which chunks hold elements.
void gather_operand(const SharedMemory& shared, const SharedDescriptor& at, bool mn_major, int extent,
                    uint16_t* halves) {
    uint64_t chunks[2 * kMaxColumns];
    const int num_chunks = 2 * extent;
    const uint64_t row_bytes = at.swizzle ? uint64_t(at.swizzle) : 16;
    const uint64_t mask = at.swizzle ? uint64_t(at.swizzle / 16 - 1) : 0;
    if (!mn_major) {
        const uint64_t step = at.swizzle ? 16 : at.leading;
        for (int i = 0; i < num_chunks; ++i) {
            const uint64_t row = uint64_t(i) / 2, half = uint64_t(i) % 2;
            chunks[i] = at.start + row / 8 * at.stride + row % 8 * row_bytes + half * step;
        }
    } else {
        const uint64_t per_k = uint64_t(extent) / 8, per_row = row_bytes / 16;
        const uint64_t across = at.swizzle ? at.leading : at.stride, along = at.swizzle ? at.stride : at.leading;
        for (uint64_t k = 0; k < uint64_t(kDepth); ++k) {
            for (uint64_t j = 0; j < per_k; ++j) {
                chunks[k * per_k + j] =
                    at.start + j % per_row * 16 + j / per_row * across + k % 8 * row_bytes + k / 8 * along;
            }
        }
    }
    uint64_t low = ~uint64_t(0), high = 0;
    for (int i = 0; i < num_chunks; ++i) {
        chunks[i] ^= (((chunks[i] >> 7) - uint64_t(at.base_offset)) & mask) << 4;
        low = std::min(low, chunks[i]);
        high = std::max(high, chunks[i] + 16);
    }
    if (low < shared.base() || high > shared.end()) {
        fail(FaultKind::memory, "MMA operand [%#llx, %#llx) leaves shared memory [%#llx, %#llx)", ull(low), ull(high),
             ull(shared.base()), ull(shared.end()));
    }
    const uint8_t* bytes = shared.at(0);
    for (int i = 0; i < num_chunks; ++i) std::memcpy(halves + 8 * i, bytes + chunks[i], 16);
}

}  // namespace

Panels& panels() {
    thread_local Panels storage;
    return storage;
}

void load_a(const SharedMemory& shared, const SharedDescriptor& at, bool mn_major, int rows, bool is_bf16, Panels& p) {
    gather_operand(shared, at, mn_major, rows, p.halves);
    const uint16_t* by_depth = p.halves;
    if (!mn_major) {
        transpose_halves(p.halves, p.turned, rows);
        by_depth = p.turned;
    }
    for (int k = 0; k < kDepth; ++k) widen_halves(by_depth + k * rows, p.a + k * kMaxRows, rows, is_bf16);
}

void load_b(const SharedMemory& shared, const SharedDescriptor& at, bool mn_major, int columns, bool is_bf16,
            Panels& p) {
    gather_operand(shared, at, mn_major, columns, p.halves);
    const uint16_t* by_column = p.halves;
    if (mn_major) {
        for (int n = 0; n < columns; ++n) {
            for (int k = 0; k < kDepth; ++k) p.turned[n * kDepth + k] = p.halves[k * columns + n];
        }
        by_column = p.turned;
    }
    widen_halves(by_column, p.b, columns * kDepth, is_bf16);
}

}  // namespace undertow
