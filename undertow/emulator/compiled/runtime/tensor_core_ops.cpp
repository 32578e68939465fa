// tcgen05.mma and tcgen05.commit for one CTA, kind::f16: see semantics/tcgen05.py and descriptors.py.
#include <algorithm>
#include <cstring>

#include "matrix_operand.hpp"
#include "operands.hpp"

namespace undertow {

using ull = unsigned long long;

namespace {

SharedDescriptor decode_shared_descriptor(uint64_t bits) {
    const int version = bits >> 46 & 3, base_offset = bits >> 49 & 7, layout = bits >> 61 & 7;
    const auto refuse = [bits](FaultKind kind, const char* reason, int value) {
        char text[160];
        std::snprintf(text, sizeof(text), reason, value);
        fail(kind, "matrix descriptor 0x%016llx: %s", ull(bits), text);
    };
    if (version != 1) refuse(FaultKind::protocol, "version field [46:48) is %d, tcgen05 needs 1", version);
    if (bits >> 53 & 0xFF) {
        refuse(FaultKind::protocol, "reserved bits [53:61) are %#x, need 0", int(bits >> 53 & 0xFF));
    }
    if (layout == 1) refuse(FaultKind::unsupported, "128-byte swizzle with 32-byte atoms", 0);
    if (layout != 0 && layout != 2 && layout != 4 && layout != 6) {
        refuse(FaultKind::protocol, "layout field [61:64) is %d; allowed are 0, 1, 2, 4, 6", layout);
    }
    if (base_offset) refuse(FaultKind::unsupported, "base offset %d", base_offset);
    if (bits >> 52 & 1) refuse(FaultKind::unsupported, "absolute leading-dimension mode", 0);
    const int swizzle = layout == 0 ? 0 : layout == 2 ? 128 : layout == 4 ? 64 : 32;
    return {(bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, swizzle, 0};
}

struct MmaShape {
    bool is_bf16, negate, a_mn_major, b_mn_major;
    int m, n;
};

MmaShape decode_instruction_descriptor(uint32_t bits) {
    const int d_format = bits >> 4 & 3, a_format = bits >> 7 & 7, b_format = bits >> 10 & 7;
    const int m = int(bits >> 24 & 31) << 4, n = int(bits >> 17 & 63) << 3;
    const auto name = [bits] {
        char text[48];
        std::snprintf(text, sizeof(text), "instruction descriptor 0x%08x", bits);
        return std::string(text);
    }();
    const char* what = name.c_str();
    const auto protocol = FaultKind::protocol;
    if (bits >> 2 & 1) fail(FaultKind::unsupported, "%s: sparse operand A", what);
    if (bits & 11) fail(protocol, "%s: bits [0:4) are %#x, need 0 for dense kind::f16", what, bits & 15);
    if (bits >> 6 & 1 || bits >> 23 & 1 || bits >> 29) {
        fail(protocol, "%s: reserved bits 6, 23 or [29:32) are set", what);
    }
    if (d_format > 1) {
        fail(protocol, "%s: accumulator format %d; allowed are 0 (f16) and 1 (f32)", what, d_format);
    }
    for (int i = 0; i < 2; ++i) {
        const int format = i ? b_format : a_format;
        if (format > 1) {
            fail(protocol, "%s: format of %s is %d; allowed are 0 (f16) and 1 (bf16)", what, i ? "B" : "A", format);
        }
    }
    const auto format_name = [](int format) { return format ? "bf16" : "f16"; };
    if (a_format != b_format) {
        fail(protocol, "%s: A is %s and B is %s; kind::f16 needs equal formats", what, format_name(a_format),
             format_name(b_format));
    }
    if (d_format == 0 && a_format == 1) fail(protocol, "%s: bf16 operands with an f16 accumulator", what);
    if (d_format == 0) fail(FaultKind::unsupported, "%s: f16 accumulator", what);
    if (m != 64 && m != 128) fail(protocol, "%s: M is %d; allowed for one CTA are 64 and 128", what, m);
    const int step = m == 64 ? 8 : 16;
    if (n % step || n < step || n > 256) {
        fail(protocol, "%s: N is %d; allowed for M = %d are multiples of %d up to 256", what, n, m, step);
    }
    return {a_format == 1, (bits >> 13 & 1) != (bits >> 14 & 1), bool(bits >> 15 & 1), bool(bits >> 16 & 1), m, n};
}

// A from 8 columns of tensor memory; each cell holds two elements, the low half first.
void load_a_from_tmem(TensorMemory& tmem, uint64_t address, const MmaShape& shape, Panels& p) {
    const int64_t row = int64_t(address >> 16), column = int64_t(address & 0xFFFF);
    if (row || shape.m != 128) {
        fail(FaultKind::unsupported, "operand A in TMEM at lane %lld with M = %d", (long long)row, shape.m);
    }
    tmem.check(column, 8, "MMA operand A");
    for (int c = 0; c < 8; ++c) {
        const uint32_t* cells = tmem.column(column + c);
        for (int r = 0; r < kMaxRows; ++r) {
            p.halves[r] = uint16_t(cells[r]);
            p.turned[r] = uint16_t(cells[r] >> 16);
        }
        widen_halves(p.halves, p.a + (2 * c) * kMaxRows, kMaxRows, shape.is_bf16);
        widen_halves(p.turned, p.a + (2 * c + 1) * kMaxRows, kMaxRows, shape.is_bf16);
    }
}

// Row of the accumulator's element i for M = 64: the first 16 rows of each quarter.
int scattered_row(int i) { return i % 16 + 32 * (i / 16); }

void accumulate(TensorMemory& tmem, uint64_t address, const MmaShape& shape, bool keep, Panels& p) {
    const int64_t row = int64_t(address >> 16), column = int64_t(address & 0xFFFF);
    if (row) fail(FaultKind::unsupported, "accumulator at TMEM lane %lld", (long long)row);
    tmem.check(column, shape.n, "MMA accumulator");
    float* d = reinterpret_cast<float*>(tmem.column(column));
    if (shape.m == 128) {
        mma_step(p.a, p.b, d, shape.m, shape.n, keep, shape.negate);
        return;
    }
    for (int n = 0; n < shape.n; ++n) {
        for (int i = 0; i < shape.m; ++i) p.scattered[n * kMaxRows + i] = d[n * kMaxRows + scattered_row(i)];
    }
    mma_step(p.a, p.b, p.scattered, shape.m, shape.n, keep, shape.negate);
    for (int n = 0; n < shape.n; ++n) {
        for (int i = 0; i < shape.m; ++i) d[n * kMaxRows + scattered_row(i)] = p.scattered[n * kMaxRows + i];
    }
}

}  // namespace

// Operands: accumulator, A (descriptor or address), B, instruction descriptor, keep, scale, disabled lanes (up to 8).
// aux: 0 A in tensor memory, 1 has a scale, 2 how many words of disabled lanes.
Step op_mma(Context& c) {
    Cta& cta = c.cta;
    const bool a_in_tmem = c.inst.aux[0];
    for_distinct(c, [&](int lane, const Operands& v) {
        for (int i = 0; i < c.inst.aux[2]; ++i) {
            if (v[6 + i]) {
                fail(FaultKind::unsupported, "tcgen05.mma with a disable-output-lane mask that is not zero");
            }
        }
        if (c.inst.aux[1] && v[5]) fail(FaultKind::unsupported, "tcgen05.mma with a scale for the accumulator");
        const MmaShape shape = decode_instruction_descriptor(uint32_t(v[3]));
        const uint64_t d = v[0], a = v[1], b = v[2];
        const bool keep = v[4];
        cta.engines.issue(Engine::tensor, c.thread(lane), [&cta, shape, a_in_tmem, d, a, b, keep] {
            Panels& p = panels();
            if (a_in_tmem) {
                load_a_from_tmem(cta.tmem, a, shape, p);
            } else {
                load_a(cta.shared, decode_shared_descriptor(a), shape.a_mn_major, shape.m, shape.is_bf16, p);
            }
            load_b(cta.shared, decode_shared_descriptor(b), shape.b_mn_major, shape.n, shape.is_bf16, p);
            accumulate(cta.tmem, d, shape, keep, p);
            cta.progress += 1;
        });
    });
    return Step::next;
}

// Operands: mbarrier. Arrives once when all earlier MMAs are complete.
Step op_commit(Context& c) {
    Cta& cta = c.cta;
    for_distinct(c, [&](int lane, const Operands& v) {
        const uint64_t barrier = shared_address(v[0]);
        cta.shared.mbarrier(barrier);
        cta.engines.issue(Engine::tensor, c.thread(lane), [&cta, barrier] {
            cta.shared.mbarrier(barrier).arrive(1, false);
            cta.progress += 1;
        });
    });
    return Step::next;
}

}  // namespace undertow
