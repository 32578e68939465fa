// wgmma: see semantics/wgmma.py.
#include <cstring>

#include "matrix_operand.hpp"
#include "operands.hpp"

namespace undertow {

using ull = unsigned long long;

namespace {

constexpr int kRows = 64;

Warpgroup& warpgroup_of(Context& c) { return c.cta.warpgroups[size_t(c.warp.number / kGroupWarps)]; }

void check_warpgroup(const Context& c, const char* what) {
    if (c.mask != kFullMask) {
        fail(FaultKind::protocol, kPartialWarp, "%s executed by part of a warp; all 32 lanes must take part", what);
    }
    if (size_t(c.warp.number / kGroupWarps * kGroupWarps + kGroupWarps) > c.cta.warps.size()) {
        fail(FaultKind::protocol, kPartialGroup, "%s by warp %d, whose warpgroup has fewer than four warps", what,
             c.warp.number);
    }
}

SharedDescriptor decode_descriptor(uint64_t bits) {
    constexpr uint64_t reserved = uint64_t(3) << 14 | uint64_t(3) << 30 | uint64_t(7) << 46 | uint64_t(0x3FF) << 52;
    if (bits & reserved) {
        fail(FaultKind::protocol, "wgmma matrix descriptor 0x%016llx: reserved bits %#llx are set", ull(bits),
             ull(bits & reserved));
    }
    constexpr int swizzles[] = {0, 128, 64, 32};
    return {(bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzles[bits >> 62],
            int(bits >> 49 & 7)};
}

struct Mma {
    int columns;
    bool is_bf16, negate, a_mn_major, b_mn_major;
    const int32_t *d, *a;  // lists of register rows; a: null for shared memory
};

// Register 2 k + h of lane l, halves c: row l / 4 + 8 h of the warp's sixteen, depth 8 k + 2 (l % 4) + c.
void load_a_from_registers(const Warp* warps, const Mma& mma, Panels& p) {
    for (int w = 0; w < kGroupWarps; ++w) {
        for (int i = 0; i < 4; ++i) {
            const uint32_t* row = target<uint32_t>(warps[w].regs, mma.a[1 + i]);
            for (int lane = 0; lane < kLanes; ++lane) {
                const int m = 16 * w + lane / 4 + 8 * (i & 1), k = 8 * (i >> 1) + 2 * (lane % 4);
                p.halves[k * kRows + m] = uint16_t(row[lane]);
                p.halves[(k + 1) * kRows + m] = uint16_t(row[lane] >> 16);
            }
        }
    }
    for (int k = 0; k < kDepth; ++k) {
        widen_halves(p.halves + k * kRows, p.a + k * kMaxRows, kRows, mma.is_bf16);
    }
}

// Calls body(register element, matrix element) for each element of the accumulator; the matrix is [column][row].
template <class Body>
void each_element(const Warp* warps, const Mma& mma, float* matrix, Body&& body) {
    for (int w = 0; w < kGroupWarps; ++w) {
        for (int i = 0; i < mma.columns / 2; ++i) {
            float* row = target<float>(warps[w].regs, mma.d[1 + i]);
            float* place = matrix + (8 * (i / 4) + (i & 1)) * kMaxRows + 16 * w + 8 * (i >> 1 & 1);
            for (int lane = 0; lane < kLanes; ++lane) body(row[lane], place[2 * (lane % 4) * kMaxRows + lane / 4]);
        }
    }
}

void multiply(Cta& cta, int group, const Mma& mma, const std::array<uint64_t, 3>& v) {
    Panels& p = panels();
    const Warp* warps = cta.warps.data() + group * kGroupWarps;
    if (mma.a) {
        load_a_from_registers(warps, mma, p);
    } else {
        load_a(cta.shared, decode_descriptor(v[0]), mma.a_mn_major, kRows, mma.is_bf16, p);
    }
    load_b(cta.shared, decode_descriptor(v[1]), mma.b_mn_major, mma.columns, mma.is_bf16, p);
    const bool keep = v[2] != 0;
    if (keep) each_element(warps, mma, p.scattered, [](float& from, float& to) { to = from; });
    mma_step(p.a, p.b, p.scattered, kRows, mma.columns, keep, mma.negate);
    each_element(warps, mma, p.scattered, [](float& to, float& from) { to = from; });
    cta.warpgroups[size_t(group)].complete += 1;
    cta.progress += 1;
}

}  // namespace

// Operands: A unless it is in registers, B, scale-d. aux: 0 columns, 1 rows of D, 2 rows of A or -1, 3 flags: bf16,
// negate, A MN-major, B MN-major; 4 PTX line.
Step op_wgmma(Context& c) {
    check_warpgroup(c, "wgmma.mma_async");
    const int flags = c.inst.aux[3];
    const Mma mma{c.inst.aux[0],    bool(flags & 1),       bool(flags & 2),
                  bool(flags & 4),  bool(flags & 8),       c.list(c.inst.aux[1]),
                  c.inst.aux[2] < 0 ? nullptr : c.list(c.inst.aux[2])};
    const Operands first = lane_operands(c, 0);
    for (int lane = 1; lane < kLanes; ++lane) {
        if (lane_operands(c, lane) != first) {
            fail(FaultKind::protocol, "operand of a warp-wide instruction differs between lanes");
        }
    }
    const std::array<uint64_t, 3> operands =
        mma.a ? std::array<uint64_t, 3>{0, first[0], first[1]} : std::array<uint64_t, 3>{first[0], first[1], first[2]};
    Cta& cta = c.cta;
    const int number = c.warp.number / kGroupWarps;
    Warpgroup& group = warpgroup_of(c);
    WarpProgress& progress = group.warps[size_t(c.warp.number % kGroupWarps)];
    cta.progress += 1;
    const size_t place = group.gathering.empty() ? 0 : size_t(progress.issued - group.gathering.front().number);
    if (place == group.gathering.size()) {
        group.gathering.push_back({c.inst.index, operands, progress.issued, c.inst.aux[4], 0});
    }
    GatheringMma& gathered = group.gathering[place];
    if (gathered.instruction != c.inst.index || gathered.operands != operands) {
        fail(FaultKind::protocol, kPartialGroup,
             "wgmma.mma_async number %lld of warpgroup %d: warp %d differs from the warps before it (PTX line %d) in "
             "the instruction, a descriptor or scale-d",
             (long long)gathered.number, number, c.warp.number, gathered.line);
    }
    progress.issued += 1;
    gathered.warps |= 1u << c.warp.number % kGroupWarps;
    if (gathered.warps != (1u << kGroupWarps) - 1) return Step::next;
    group.gathering.pop_front();
    std::vector<Operation> after;
    if (cta.last_mma[size_t(number)]) after.push_back(cta.last_mma[size_t(number)]);
    cta.last_mma[size_t(number)] =
        cta.engines.issue(Engine::wgmma, number * kGroupWarps * kLanes,
                          [&cta, number, mma, operands] { multiply(cta, number, mma, operands); }, std::move(after));
    return Step::next;
}

Step op_wgmma_fence(Context& c) {
    check_warpgroup(c, "wgmma.fence");
    return Step::next;
}

Step op_wgmma_commit(Context& c) {
    check_warpgroup(c, "wgmma.commit_group");
    warpgroup_of(c).commit(c.warp.number % kGroupWarps);
    return Step::next;
}

// s[0]: groups that may stay open.
Step op_wgmma_wait(Context& c) {
    check_warpgroup(c, "wgmma.wait_group");
    Warpgroup& group = warpgroup_of(c);
    const uint32_t limit = c.row<uint32_t>(c.inst.s[0])[0];
    const int64_t needed = group.warps[size_t(c.warp.number % kGroupWarps)].needed(limit);
    if (group.complete >= needed) return Step::next;
    Wait wait;
    wait.kind = WaitKind::wgmma_group;
    wait.subject = limit;
    wait.argument = needed;
    c.group.wait = wait;
    return Step::blocked;
}

}  // namespace undertow
