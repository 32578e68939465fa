// Operands of forms that act once per distinct tuple of values, not once per lane: copies and MMAs.
#pragma once

#include <array>

#include "machine.hpp"

namespace undertow {

constexpr int kMaxOperands = 12;
using Operands = std::array<uint64_t, kMaxOperands>;

uint64_t shared_address(uint64_t value);  // generic to shared; shared addresses stay as they are
uint64_t global_address(uint64_t value);  // refuses other windows

// aux[6] is a list: its length, then (row, bits, offset) for each operand; bits 1 means a predicate.
inline Operands lane_operands(const Context& c, int lane) {
    const int32_t* list = c.list(c.inst.aux[6]);
    const int count = list[0] / 3;
    Operands values{};
    for (int k = 0; k < count; ++k) {
        const int32_t ref = list[1 + 3 * k], width = list[2 + 3 * k];
        const int64_t offset = list[3 + 3 * k];
        switch (width) {
            case 1: values[k] = c.predicate(ref) >> lane & 1; break;
            case 16: values[k] = c.row<uint16_t>(ref)[lane]; break;
            case 32: values[k] = uint32_t(c.row<uint32_t>(ref)[lane] + uint32_t(offset)); break;
            default: values[k] = c.row<uint64_t>(ref)[lane] + uint64_t(offset);
        }
    }
    return values;
}

// Calls body(lane, operands) for the first lane of each distinct tuple among the active lanes: the hardware loops over
// distinct operands of such instructions.
template <class Body>
void for_distinct(const Context& c, Body&& body) {
    uint32_t left = c.mask;
    while (left) {
        const int lane = __builtin_ctz(left);
        const Operands values = lane_operands(c, lane);
        left &= left - 1;
        uint32_t others = left;
        for (; others; others &= others - 1) {
            if (lane_operands(c, __builtin_ctz(others)) == values) left &= ~(others & -others);
        }
        body(lane, values);
    }
}

}  // namespace undertow
