// ld, st, atom, red: PTX ISA, "Data Movement" and "Parallel Synchronization".
//
// aux of all: 0 space (below), 1 bytes per element, 2 number of elements, 3 bits of a register's row, 4 sign-extend,
// 5 whether the address register has 64 bits, 6 start of the operand list of a vector (or -1), 7 of a load whether it
// polls (volatile, relaxed, acquire), of an atomic AtomicOp | AtomicType << 8.
// Operands: s[0] address row, imm its offset, s[1] value, s[2] swap value of cas; d[0] destination.
#include "memory_ops.hpp"

#include <algorithm>

#include "atomics.hpp"
#include "cluster.hpp"
#include "lanes.hpp"

namespace undertow {

using ull = unsigned long long;

void lane_addresses(const Context& c, int32_t ref, bool is_wide, int64_t offset, uint64_t* addresses) {
    if (is_wide) {
        const uint64_t* base = c.row<uint64_t>(ref);
        for (int i = 0; i < kLanes; ++i) addresses[i] = base[i] + uint64_t(offset);
    } else {
        const uint32_t* base = c.row<uint32_t>(ref);
        for (int i = 0; i < kLanes; ++i) addresses[i] = uint32_t(base[i] + uint32_t(offset));
    }
}

namespace {

struct Range {
    uint64_t low = ~uint64_t(0), high = 0, bits = 0;
};

Range range_of(const uint64_t* addresses, uint32_t mask) {
    Range r;
    if (mask == kFullMask) {
        for (int i = 0; i < kLanes; ++i) {
            r.low = std::min(r.low, addresses[i]);
            r.high = std::max(r.high, addresses[i]);
            r.bits |= addresses[i];
        }
        return r;
    }
    for (uint32_t left = mask; left; left &= left - 1) {
        uint64_t a = addresses[__builtin_ctz(left)];
        r.low = std::min(r.low, a);
        r.high = std::max(r.high, a);
        r.bits |= a;
    }
    return r;
}

uint64_t first_misaligned(const uint64_t* addresses, uint32_t mask, uint64_t size) {
    for (uint32_t left = mask; left; left &= left - 1) {
        uint64_t a = addresses[__builtin_ctz(left)];
        if (a & (size - 1)) return a;
    }
    return 0;
}

void check_flat(const uint64_t* addresses, uint32_t mask, uint64_t size, uint64_t base, uint64_t end,
                const char* label) {
    Range r = range_of(addresses, mask);
    if (r.low < base || r.high + size > end) {
        fail(FaultKind::memory, "%llu bytes at %#llx are outside %s [%#llx, %#llx)", ull(size),
             ull(r.low < base ? r.low : r.high), label, ull(base), ull(end));
    }
    if (r.bits & (size - 1)) {
        fail(FaultKind::memory, "%llu bytes at %#llx in %s are not aligned to their size", ull(size),
             ull(first_misaligned(addresses, mask, size)), label);
    }
}

void refuse_cells(const SharedMemory& shared, const uint64_t* addresses, uint32_t mask, uint64_t size) {
    for (uint32_t left = mask; left; left &= left - 1) {
        uint64_t a = addresses[__builtin_ctz(left)];
        if (shared.covers_cell(a, size)) {
            fail(FaultKind::memory, "ordinary access of %llu bytes at %#llx touches an mbarrier", ull(size), ull(a));
        }
    }
}

}  // namespace

// Calls body(mask, bytes, addresses) for each set of lanes whose memory is one flat host array: the byte of a lane is
// bytes + addresses[lane]. Splits generic addresses by window and global ones by buffer.
template <class Body>
void MemoryAccess::for_each_memory(Body&& body) {
    uint32_t left = c.mask;
    while (left) {
        uint32_t lanes = left;
        Space where = space;
        uint64_t window = 0;
        if (space == Space::generic) {
            int first = __builtin_ctz(left);
            window = addresses[first] >> 32;
            lanes = 0;
            for (uint32_t rest = left; rest; rest &= rest - 1) {
                int lane = __builtin_ctz(rest);
                if (addresses[lane] >> 32 == window) lanes |= 1u << lane;
            }
            where = space_of_window(window);
            if (where == Space::global) {
                lanes = left;
                for (uint32_t rest = left; rest; rest &= rest - 1) {
                    int lane = __builtin_ctz(rest);
                    if (space_of_window(addresses[lane] >> 32) != Space::global) lanes &= ~(1u << lane);
                }
            } else {
                for (int i = 0; i < kLanes; ++i) addresses[i] &= (lanes >> i & 1) ? 0xffffffffull : ~0ull;
            }
        }
        left &= ~lanes;
        in_space(where, lanes, body);
    }
}

template <class Body>
void MemoryAccess::in_space(Space where, uint32_t lanes, Body&& body) {
    Cta& cta = c.cta;
    if (where == Space::shared) {
        Range r = range_of(addresses, lanes);
        if (__builtin_expect(r.high >> kRankShift != 0 && cta.cluster->ctas.size() > 1, 0)) {
            in_cluster(lanes, body);
            return;
        }
        if (cta.shared.near_cells(r.low, r.high + size)) refuse_cells(cta.shared, addresses, lanes, size);
        check_flat(addresses, lanes, size, cta.shared.base(), cta.shared.end(), "shared memory");
        body(lanes, cta.shared.at(0));
    } else if (where == Space::param) {
        if (kind != AccessKind::read) fail(FaultKind::memory, "write to the parameter block of a kernel");
        auto& block = cta.launch.parameters;
        check_flat(addresses, lanes, size, 0, block.size(), "the parameter block");
        body(lanes, block.data());
    } else if (where == Space::local) {
        uint64_t bytes = std::max<int64_t>(c.program.local_bytes, 16);
        Range r = range_of(addresses, lanes);
        if (r.high + size > bytes || (r.bits & (size - 1))) {
            fail(FaultKind::memory, "%llu bytes at local address %#llx: misaligned or outside", ull(size), ull(r.high));
        }
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            int lane = __builtin_ctz(rest);
            body(1u << lane, cta.local.data() + uint64_t(c.thread(lane)) * bytes);
        }
    } else {
        while (lanes) {
            Range r = range_of(addresses, lanes);
            Buffer& buffer = cta.global_buffer(r.low, r.high + size, size);
            uint32_t here = lanes;
            if (r.high + size > buffer.end) {
                here = 0;
                for (uint32_t rest = lanes; rest; rest &= rest - 1) {
                    int lane = __builtin_ctz(rest);
                    if (&cta.launch.global.find(addresses[lane], size) == &buffer) here |= 1u << lane;
                }
            }
            if (kind != AccessKind::read && !buffer.writable) {
                fail(FaultKind::memory, "write to %s, which is read-only on the host", buffer.label.c_str());
            }
            cta.before_access(buffer);
            check_flat(addresses, here, size, buffer.base, buffer.end, buffer.label.c_str());
            body(here, buffer.host - buffer.base);
            lanes &= ~here;
        }
    }
}

// Lanes by the CTA whose shared memory they name.
template <class Body>
void MemoryAccess::in_cluster(uint32_t lanes, Body&& body) {
    while (lanes) {
        const uint64_t rank = addresses[__builtin_ctz(lanes)] >> kRankShift;
        uint32_t here = 0;
        for (uint32_t rest = lanes; rest; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            if (addresses[lane] >> kRankShift != rank) continue;
            here |= 1u << lane;
            addresses[lane] &= kAddressMask;
        }
        Cta& home = locate(c.cta, rank << kRankShift).home;
        SharedMemory& shared = home.shared;
        Range r = range_of(addresses, here);
        if (shared.near_cells(r.low, r.high + size)) refuse_cells(shared, addresses, here, size);
        check_flat(addresses, here, size, shared.base(), shared.end(), "shared memory");
        if (kind != AccessKind::read) home.progress += 1;
        body(here, shared.at(0));
        lanes &= ~here;
    }
}

Space MemoryAccess::space_of_window(uint64_t high) {
    constexpr uint64_t shared = kSharedWindow >> 32, param = kParamWindow >> 32, local = kLocalWindow >> 32;
    return high == shared ? Space::shared : high == param ? Space::param : high == local ? Space::local : Space::global;
}

MemoryAccess::MemoryAccess(const Context& context, AccessKind access)
    : c(context), kind(access), space(Space(context.inst.aux[0])),
      size(uint64_t(context.inst.aux[1]) * uint64_t(context.inst.aux[2])) {
    lane_addresses(c, c.inst.s[0], c.inst.aux[5] != 0, c.inst.imm, addresses);
}

namespace {

template <class Memory, class Register>
void load_as(const Context& c, MemoryAccess& access) {
    const int count = c.inst.aux[2];
    Register* rows[8];
    for (int k = 0; k < count; ++k) {
        rows[k] = c.out<Register>(c.inst.aux[6] < 0 ? c.inst.d[0] : c.list(c.inst.aux[6])[1 + k]);
    }
    access.for_each_memory([&](uint32_t lanes, const uint8_t* bytes) {
        const uint64_t* addresses = access.addresses;
        for (int k = 0; k < count; ++k) {
            Register* row = rows[k];
            const uint8_t* from = bytes + k * sizeof(Memory);
            if (lanes == kFullMask) {
                for (int i = 0; i < kLanes; ++i) {
                    Memory value;
                    std::memcpy(&value, from + addresses[i], sizeof(Memory));
                    row[i] = Register(value);
                }
                continue;
            }
            for (uint32_t left = lanes; left; left &= left - 1) {
                int i = __builtin_ctz(left);
                Memory value;
                std::memcpy(&value, from + addresses[i], sizeof(Memory));
                row[i] = Register(value);
            }
        }
    });
}

template <class Register>
void load_into(const Context& c, MemoryAccess& access) {
    const bool is_signed = c.inst.aux[4] != 0;
    using Signed = std::make_signed_t<Register>;
    switch (c.inst.aux[1]) {
        case 1:
            return is_signed ? load_as<int8_t, Signed>(c, access) : load_as<uint8_t, Register>(c, access);
        case 2:
            return is_signed ? load_as<int16_t, Signed>(c, access) : load_as<uint16_t, Register>(c, access);
        case 4:
            return is_signed ? load_as<int32_t, Signed>(c, access) : load_as<uint32_t, Register>(c, access);
        default:
            return load_as<uint64_t, Register>(c, access);
    }
}

template <class Memory, class Register>
void store_as(const Context& c, MemoryAccess& access) {
    const int count = c.inst.aux[2];
    const Register* rows[8];
    for (int k = 0; k < count; ++k) {
        rows[k] = c.row<Register>(c.inst.aux[6] < 0 ? c.inst.s[1] : c.list(c.inst.aux[6])[1 + k]);
    }
    access.for_each_memory([&](uint32_t lanes, uint8_t* bytes) {
        for (uint32_t left = lanes; left; left &= left - 1) {
            int i = __builtin_ctz(left);
            uint8_t* to = bytes + access.addresses[i];
            for (int k = 0; k < count; ++k) {
                Memory value = Memory(rows[k][i]);
                std::memcpy(to + k * sizeof(Memory), &value, sizeof(Memory));
            }
        }
    });
}

template <class Register>
void store_from(const Context& c, MemoryAccess& access) {
    switch (c.inst.aux[1]) {
        case 1:
            return store_as<uint8_t, Register>(c, access);
        case 2:
            return store_as<uint16_t, Register>(c, access);
        case 4:
            return store_as<uint32_t, Register>(c, access);
        default:
            return store_as<uint64_t, Register>(c, access);
    }
}

template <class Element>
void atomic_as(const Context& c, MemoryAccess& access) {
    const int count = c.inst.aux[2];
    const auto op = AtomicOp(c.inst.aux[7] & 0xff);
    const auto type = AtomicType(c.inst.aux[7] >> 8);
    const bool returns = c.inst.d[0] >= 0 || c.inst.d[1] >= 0;
    bool has_changed = false;
    access.for_each_memory([&](uint32_t lanes, uint8_t* bytes) {
        for (uint32_t left = lanes; left; left &= left - 1) {
            int i = __builtin_ctz(left);
            for (int k = 0; k < count; ++k) {
                const bool is_vector = c.inst.aux[6] >= 0;
                const int32_t from = is_vector ? c.list(c.inst.aux[6])[1 + k] : c.inst.s[1];
                uint8_t* place = bytes + access.addresses[i] + k * sizeof(Element);
                Element old, swap = 0;
                std::memcpy(&old, place, sizeof(Element));
                if (op == AtomicOp::cas) swap = c.row<Element>(c.inst.s[2])[i];
                const Element operand = c.row<Element>(from)[i];
                const Element fresh = Element(combine(op, type, uint64_t(old), uint64_t(operand), uint64_t(swap)));
                std::memcpy(place, &fresh, sizeof(Element));
                has_changed |= fresh != old;
                if (!returns) continue;
                const int32_t to = is_vector ? c.list(c.inst.d[1])[1 + k] : c.inst.d[0];
                c.out<Element>(to)[i] = old;
            }
        }
    });
    (has_changed ? c.cta.progress : c.cta.polls) += 1;
}

}  // namespace

Step op_load(Context& c) {
    MemoryAccess access(c, AccessKind::read);
    c.cta.polls += c.inst.aux[7];
    switch (c.inst.aux[3]) {
        case 16:
            load_into<uint16_t>(c, access);
            break;
        case 32:
            load_into<uint32_t>(c, access);
            break;
        default:
            load_into<uint64_t>(c, access);
    }
    return Step::next;
}

Step op_store(Context& c) {
    MemoryAccess access(c, AccessKind::write);
    c.cta.progress += 1;
    switch (c.inst.aux[3]) {
        case 16:
            store_from<uint16_t>(c, access);
            break;
        case 32:
            store_from<uint32_t>(c, access);
            break;
        default:
            store_from<uint64_t>(c, access);
    }
    return Step::next;
}

Step op_atomic(Context& c) {
    MemoryAccess access(c, AccessKind::atomic);
    switch (c.inst.aux[1]) {
        case 2:
            atomic_as<uint16_t>(c, access);
            break;
        case 4:
            atomic_as<uint32_t>(c, access);
            break;
        default:
            atomic_as<uint64_t>(c, access);
    }
    return Step::next;
}

}  // namespace undertow
