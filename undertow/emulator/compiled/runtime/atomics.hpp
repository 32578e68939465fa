// How an atomic or a reducing copy combines the old value with the new one; see semantics/atomics.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.hpp"

namespace undertow {

enum class AtomicOp : int { and_ = 0, or_, xor_, exch, add, inc, dec, min, max, cas };
enum class AtomicType : int { u16 = 0, u32, u64, s32, s64, f32, f64, f16, bf16, f16x2, bf16x2 };

template <class T, class Bits>
inline uint64_t combine_numbers(AtomicOp op, uint64_t old, uint64_t fresh) {
    T a = bits<T>(Bits(old)), b = bits<T>(Bits(fresh)), result;
    if (op == AtomicOp::add) {
        result = a + b;
    } else if (op == AtomicOp::min) {
        result = a != a ? b : b != b ? a : b < a ? b : a;
    } else {
        result = a != a ? b : b != b ? a : b > a ? b : a;
    }
    return uint64_t(bits<Bits>(result));
}

inline uint16_t combine_halves(AtomicOp op, bool is_bf16, uint16_t old, uint16_t fresh) {
    float a = is_bf16 ? bf16_to_f32(old) : f16_to_f32(old), b = is_bf16 ? bf16_to_f32(fresh) : f16_to_f32(fresh);
    float result = op == AtomicOp::add ? a + b : op == AtomicOp::min ? fmin_num(a, b) : fmax_num(a, b);
    return is_bf16 ? f32_to_bf16(result) : f32_to_f16(result);
}

inline uint64_t combine_packed(AtomicOp op, bool is_bf16, uint64_t old, uint64_t fresh) {
    uint32_t low = combine_halves(op, is_bf16, uint16_t(old), uint16_t(fresh));
    uint32_t high = combine_halves(op, is_bf16, uint16_t(old >> 16), uint16_t(fresh >> 16));
    return high << 16 | low;
}

// Bit patterns in, bit pattern out. For cas, `fresh` is the comparison value and `swap` the value stored.
inline uint64_t combine(AtomicOp op, AtomicType type, uint64_t old, uint64_t fresh, uint64_t swap = 0) {
    switch (op) {
        case AtomicOp::and_:
            return old & fresh;
        case AtomicOp::or_:
            return old | fresh;
        case AtomicOp::xor_:
            return old ^ fresh;
        case AtomicOp::exch:
            return fresh;
        case AtomicOp::cas:
            return old == fresh ? swap : old;
        case AtomicOp::inc:
            return old >= fresh ? 0 : old + 1;
        case AtomicOp::dec:
            return old == 0 || old > fresh ? fresh : old - 1;
        default:
            break;
    }
    switch (type) {
        case AtomicType::u16:
            return combine_numbers<uint16_t, uint16_t>(op, old, fresh);
        case AtomicType::u32:
            return combine_numbers<uint32_t, uint32_t>(op, old, fresh);
        case AtomicType::u64:
            return combine_numbers<uint64_t, uint64_t>(op, old, fresh);
        case AtomicType::s32:
            return combine_numbers<int32_t, uint32_t>(op, old, fresh);
        case AtomicType::s64:
            return combine_numbers<int64_t, uint64_t>(op, old, fresh);
        case AtomicType::f32:
            return combine_numbers<float, uint32_t>(op, old, fresh);
        case AtomicType::f64:
            return combine_numbers<double, uint64_t>(op, old, fresh);
        case AtomicType::f16:
            return combine_halves(op, false, uint16_t(old), uint16_t(fresh));
        case AtomicType::bf16:
            return combine_halves(op, true, uint16_t(old), uint16_t(fresh));
        case AtomicType::f16x2:
            return combine_packed(op, false, old, fresh);
        case AtomicType::bf16x2:
            return combine_packed(op, true, old, fresh);
    }
    return old;
}

}  // namespace undertow
