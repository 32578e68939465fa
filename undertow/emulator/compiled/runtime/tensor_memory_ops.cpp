// tcgen05.alloc, dealloc, ld, st, wait; ldmatrix, stmatrix, movmatrix: see semantics/tcgen05.py and warp_matrix.py.
#include <cstring>

#include "memory_ops.hpp"
#include "operands.hpp"

namespace undertow {

using ull = unsigned long long;

namespace {

void check_whole(const Context& c, const char* what) {
    if (c.mask != kFullMask) {
        fail(FaultKind::protocol, kPartialWarp, "%s executed by part of a warp; all 32 lanes must take part", what);
    }
}

// A 32-bit operand that must be the same in all lanes.
uint32_t warp_value(const Context& c, int32_t ref) {
    const uint32_t* row = c.row<uint32_t>(ref);
    for (int i = 1; i < kLanes; ++i) {
        if (row[i] != row[0]) {
            fail(FaultKind::protocol, "operand of a warp-wide instruction differs between lanes");
        }
    }
    return row[0];
}

// First column and row of a 32x32b access to `count` columns.
struct Quarter {
    Quarter(const Context& c, int64_t count, const char* what) {
        const uint32_t value = warp_value(c, c.inst.s[0]) + uint32_t(c.inst.imm);
        row = value >> 16;
        column = value & 0xFFFF;
        const int64_t own = 32 * (c.warp.number % 4);
        if (row != own) {
            fail(FaultKind::memory, Rule{"tmem-lane"},
                 "%s at TMEM lane %lld by warp %d, which may use lanes %lld to %lld only", what, (long long)row,
                 c.warp.number, (long long)own, (long long)(own + 31));
        }
        c.cta.tmem.check(column, count, what);
    }
    int64_t row, column;
};

}  // namespace

// Operands: where to write the address, columns.
Step op_tmem_alloc(Context& c) {
    check_whole(c, "tcgen05.alloc");
    const Operands v = lane_operands(c, 0);
    const uint64_t target = shared_address(v[0]);
    const int64_t wanted = int64_t(v[1]);
    const int64_t column = c.cta.tmem.allocate(wanted);
    if (column < 0) {
        Wait wait;
        wait.kind = WaitKind::tmem_alloc;
        wait.subject = uint64_t(wanted);
        c.group.wait = wait;
        return Step::blocked;
    }
    c.cta.shared.check_range(target, 4);
    const uint32_t value = uint32_t(column);
    std::memcpy(c.cta.shared.at(target), &value, 4);
    c.cta.progress += 1;
    return Step::next;
}

Step op_tmem_dealloc(Context& c) {
    check_whole(c, "tcgen05.dealloc");
    const uint32_t start = warp_value(c, c.inst.s[0]);
    c.cta.tmem.deallocate(start & 0xFFFF, c.row<uint32_t>(c.inst.s[1])[0]);
    c.cta.progress += 1;
    return Step::next;
}

Step op_tmem_relinquish(Context& c) {
    check_whole(c, "tcgen05.relinquish_alloc_permit");
    c.cta.tmem.may_allocate = false;
    return Step::next;
}

// s[0]: address, imm: its offset; aux: 0 columns, 6 list of registers.
Step op_tmem_load(Context& c) {
    check_whole(c, "tcgen05.ld");
    const int count = c.inst.aux[0];
    const Quarter at(c, count, "tcgen05.ld");
    const int32_t* list = c.list(c.inst.aux[6]) + 1;
    for (int k = 0; k < count; ++k) {
        std::memcpy(c.out<uint32_t>(list[k]), c.cta.tmem.column(at.column + k) + at.row, kLanes * 4);
    }
    return Step::next;
}

Step op_tmem_store(Context& c) {
    check_whole(c, "tcgen05.st");
    const int count = c.inst.aux[0];
    const Quarter at(c, count, "tcgen05.st");
    const int32_t* list = c.list(c.inst.aux[6]) + 1;
    for (int k = 0; k < count; ++k) {
        std::memcpy(c.cta.tmem.column(at.column + k) + at.row, c.row<uint32_t>(list[k]), kLanes * 4);
    }
    c.cta.progress += 1;
    return Step::next;
}

Step op_tmem_wait(Context& c) {
    check_whole(c, "tcgen05.wait");
    return Step::next;
}

namespace {

// Shared byte addresses of the rows that lanes 0 .. 8 * count - 1 name.
void matrix_rows(const Context& c, int count, const char* opcode, uint64_t* rows) {
    if (c.mask != kFullMask) fail(FaultKind::protocol, "%s executed by part of a warp", opcode);
    lane_addresses(c, c.inst.s[0], c.inst.aux[5] != 0, c.inst.imm, rows);
    for (int i = 0; i < 8 * count; ++i) {
        rows[i] = shared_address(rows[i]);
        c.cta.shared.check_range(rows[i], 16);
        if (rows[i] % 16) {
            fail(FaultKind::memory, "16 bytes at %#llx in shared memory are not aligned to their size", ull(rows[i]));
        }
    }
}

uint64_t element_address(const uint64_t* rows, int tile, int lane, int half, bool is_transposed) {
    int line = lane / 4, column = 2 * (lane % 4) + half;
    if (is_transposed) std::swap(line, column);
    return rows[8 * tile + line] + 2 * uint64_t(column);
}

}  // namespace

// aux: 0 tiles, 1 .trans, 6 list of registers.
Step op_ldmatrix(Context& c) {
    const int count = c.inst.aux[0];
    uint64_t rows[kLanes];
    matrix_rows(c, count, "ldmatrix", rows);
    for (int tile = 0; tile < count; ++tile) {
        uint32_t* d = c.out<uint32_t>(c.list(c.inst.aux[6])[1 + tile]);
        for (int lane = 0; lane < kLanes; ++lane) {
            uint16_t halves[2];
            for (int h = 0; h < 2; ++h) {
                std::memcpy(&halves[h], c.cta.shared.at(element_address(rows, tile, lane, h, c.inst.aux[1])), 2);
            }
            d[lane] = uint32_t(halves[0]) | uint32_t(halves[1]) << 16;
        }
    }
    return Step::next;
}

Step op_stmatrix(Context& c) {
    const int count = c.inst.aux[0];
    uint64_t rows[kLanes];
    matrix_rows(c, count, "stmatrix", rows);
    for (int tile = 0; tile < count; ++tile) {
        const uint32_t* from = c.row<uint32_t>(c.list(c.inst.aux[6])[1 + tile]);
        for (int h = 0; h < 2; ++h) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint16_t value = uint16_t(from[lane] >> (16 * h));
                std::memcpy(c.cta.shared.at(element_address(rows, tile, lane, h, c.inst.aux[1])), &value, 2);
            }
        }
    }
    c.cta.progress += 1;
    return Step::next;
}

// s: the tile that the lanes hold; d: its transpose.
Step op_movmatrix(Context& c) {
    if (c.mask != kFullMask) fail(FaultKind::protocol, "movmatrix executed by part of a warp");
    const uint16_t* from = c.row<uint16_t>(c.inst.s[0]);
    uint16_t halves[2 * kLanes];
    for (int row = 0; row < 8; ++row) {
        for (int column = 0; column < 8; ++column) halves[8 * column + row] = from[8 * row + column];
    }
    std::memcpy(c.out<uint16_t>(c.inst.d[0]), halves, sizeof(halves));
    return Step::next;
}

}  // namespace undertow
