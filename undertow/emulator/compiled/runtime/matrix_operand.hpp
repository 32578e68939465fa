// Matrix operands that a tensor core reads from shared memory: see descriptors.py and semantics/matrix_operand.py.
#pragma once

#include "machine.hpp"
#include "mma_kernel.hpp"

namespace undertow {

// Byte addresses and strides; the swizzle counts rows of 128 bytes from `base_offset` on.
struct SharedDescriptor {
    uint64_t start, leading, stride;
    int swizzle, base_offset;
};

// Working storage of an MMA: both operands as they lie in memory and as doubles.
struct Panels {
    alignas(64) uint16_t halves[kMaxColumns * kDepth];
    alignas(64) uint16_t turned[kMaxColumns * kDepth];
    alignas(64) double a[kDepth * kMaxRows];
    alignas(64) double b[kMaxColumns * kDepth];
    alignas(64) float scattered[kMaxColumns * kMaxRows];
};

Panels& panels();  // of this thread

// A as [k][row], `rows` of them.
void load_a(const SharedMemory& shared, const SharedDescriptor& at, bool mn_major, int rows, bool is_bf16, Panels& p);
// B as [column][k].
void load_b(const SharedMemory& shared, const SharedDescriptor& at, bool mn_major, int columns, bool is_bf16,
            Panels& p);

}  // namespace undertow
