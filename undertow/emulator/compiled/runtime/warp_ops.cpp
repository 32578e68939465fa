// Warp collectives and register moves that mix lanes or rows: shfl, elect, vote, match, redux, mov with vectors.
#include <algorithm>

#include "lanes.hpp"
#include "machine.hpp"

namespace undertow {

void check_members(const Context& c, uint32_t members) {
    if (c.mask != c.group.mask) {
        fail(FaultKind::protocol, kPartialWarp,
             "a warp collective is guarded by a predicate that is false in some of its lanes");
    }
    uint32_t present = c.group.mask;
    if (members == kFullMask && present == kFullMask) return;
    uint32_t live = c.warp.live_mask() | present;
    if (((members & live) & ~present) || (present & ~members)) {
        fail(FaultKind::protocol, kPartialWarp,
             "warp collective with member mask 0x%08x reached by lanes 0x%08x of warp %d only", members, present,
             c.warp.number);
    }
}

namespace {

uint32_t members_of(const Context& c, int32_t ref) { return c.row<uint32_t>(ref)[c.lane()]; }

void write_predicate(const Context& c, int32_t ref, uint32_t value) {
    if (ref < 0) return;
    uint32_t& row = *c.out<uint32_t>(ref);
    row = (row & ~c.mask) | (value & c.mask);
}

// Source lane of shfl by the manual's formula; the lane itself where that is out of range.
inline int shuffle_source(int mode, int lane, uint32_t b, uint32_t c, bool& is_valid) {
    int distance = int(b & 31), clamp = int(c & 31), segment = int((c >> 8) & 31);
    int max_lane = (lane & segment) | (clamp & ~segment);
    int from;
    if (mode == 0) {
        from = lane - distance;
        is_valid = from >= max_lane;
    } else if (mode == 1) {
        from = lane + distance;
        is_valid = from <= max_lane;
    } else if (mode == 2) {
        from = lane ^ distance;
        is_valid = from <= max_lane;
    } else {
        from = (lane & segment) | (distance & ~segment);
        is_valid = from <= max_lane;
    }
    return is_valid ? from : lane;
}

}  // namespace

// aux[0]: mode up, down, bfly, idx; s: a, b, c, members; d: value, predicate.
Step op_shfl(Context& c) {
    check_members(c, members_of(c, c.inst.s[3]));
    const uint32_t* a = c.row<uint32_t>(c.inst.s[0]);
    const uint32_t* b = c.row<uint32_t>(c.inst.s[1]);
    const uint32_t* limits = c.row<uint32_t>(c.inst.s[2]);
    uint32_t values[kLanes], valid = 0;
    each_lane(c.mask, [&](int lane) {
        bool is_valid;
        int from = shuffle_source(c.inst.aux[0], lane, b[lane], limits[lane], is_valid);
        if (!(c.mask >> from & 1)) {
            fail(FaultKind::protocol, "shfl.sync reads the register of a lane that does not take part");
        }
        values[lane] = a[from];
        valid |= uint32_t(is_valid) << lane;
    });
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = values[lane]; });
    write_predicate(c, c.inst.d[1], valid);
    return Step::next;
}

// s: members; d: leader, predicate. The lowest lane of the member mask is elected.
Step op_elect(Context& c) {
    uint32_t members = members_of(c, c.inst.s[0]);
    check_members(c, members);
    int leader = __builtin_ctz(members);
    if (c.inst.d[0] >= 0) {
        uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
        each_lane(c.mask, [&](int lane) { d[lane] = uint32_t(leader); });
    }
    write_predicate(c, c.inst.d[1], 1u << leader);
    return Step::next;
}

// aux[0]: all, any, uni; s: predicate, members; d: predicate.
Step op_vote(Context& c) {
    check_members(c, members_of(c, c.inst.s[1]));
    uint32_t chosen = c.predicate(c.inst.s[0]) & c.mask;
    bool all = chosen == c.mask, any = chosen != 0;
    bool result = c.inst.aux[0] == 0 ? all : c.inst.aux[0] == 1 ? any : all || !any;
    write_predicate(c, c.inst.d[0], result ? kFullMask : 0);
    return Step::next;
}

Step op_vote_ballot(Context& c) {
    check_members(c, members_of(c, c.inst.s[1]));
    uint32_t chosen = c.predicate(c.inst.s[0]) & c.mask;
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = chosen; });
    return Step::next;
}

// aux[0]: whether all lanes must match (match.all), aux[1]: whether values have 64 bits; s: values, members.
Step op_match(Context& c) {
    check_members(c, members_of(c, c.inst.s[1]));
    auto value = [&](int lane) {
        return c.inst.aux[1] ? c.row<uint64_t>(c.inst.s[0])[lane] : uint64_t(c.row<uint32_t>(c.inst.s[0])[lane]);
    };
    uint32_t results[kLanes], equal = 0;
    each_lane(c.mask, [&](int lane) {
        uint32_t same = 0;
        each_lane(c.mask, [&](int other) { same |= uint32_t(value(other) == value(lane)) << other; });
        results[lane] = c.inst.aux[0] ? (same == c.mask ? c.mask : 0) : same;
        equal |= uint32_t(results[lane] != 0) << lane;
    });
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = results[lane]; });
    write_predicate(c, c.inst.d[1], equal);
    return Step::next;
}

namespace {

// Minimum or maximum of f32 over the lanes: numbers win over NaN unless `nan_wins`.
float extreme_of(const Context& c, const float* a, bool is_min, bool is_magnitude, bool nan_wins) {
    const auto value = [&](int lane) { return is_magnitude ? std::fabs(a[lane]) : a[lane]; };
    float result = value(c.lane());
    each_lane(c.mask & (c.mask - 1), [&](int lane) {
        const float x = result, y = value(lane);
        result = nan_wins ? (is_min ? fmin_nan(x, y) : fmax_nan(x, y)) : is_min ? fmin_num(x, y) : fmax_num(x, y);
    });
    return result;
}

}  // namespace

// aux: 0 min, max; 1 .abs; 2 .NaN; s: values, members.
Step op_redux_float(Context& c) {
    check_members(c, members_of(c, c.inst.s[1]));
    const float result =
        extreme_of(c, c.row<float>(c.inst.s[0]), c.inst.aux[0] == 0, c.inst.aux[1] != 0, c.inst.aux[2] != 0);
    float* d = c.out<float>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = result; });
    return Step::next;
}

// aux[0]: add, min, max, and, or, xor; aux[1]: signed; s: values, members.
Step op_redux(Context& c) {
    check_members(c, members_of(c, c.inst.s[1]));
    const uint32_t* a = c.row<uint32_t>(c.inst.s[0]);
    uint32_t result = a[c.lane()];
    each_lane(c.mask & (c.mask - 1), [&](int lane) {
        uint32_t x = result, y = a[lane];
        bool less = c.inst.aux[1] ? int32_t(x) < int32_t(y) : x < y;
        switch (c.inst.aux[0]) {
            case 0: result = x + y; break;
            case 1: result = less ? x : y; break;
            case 2: result = less ? y : x; break;
            case 3: result = x & y; break;
            case 4: result = x | y; break;
            default: result = x ^ y;
        }
    });
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = result; });
    return Step::next;
}

Step op_activemask(Context& c) {
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = c.group.mask; });
    return Step::next;
}

Step op_bar_warp_sync(Context& c) {
    check_members(c, members_of(c, c.inst.s[0]));
    return Step::next;
}

namespace {

// mov with a vector: `Wide` rows hold `Parts` elements of `Narrow`, the first one lowest.
template <class Wide, class Narrow>
void pack(const Context& c) {
    constexpr int parts = sizeof(Wide) / sizeof(Narrow);
    const int32_t* list = c.list(c.inst.aux[0]) + 1;
    Narrow* d = c.out<Narrow>(c.inst.d[0]);
    if (parts == 2 && c.mask == kFullMask) {  // the common case, in a form that vectorises
        const Narrow *low = c.row<Narrow>(list[0]), *high = c.row<Narrow>(list[1]);
#pragma GCC ivdep
        for (int i = 0; i < kLanes; ++i) {
            d[2 * i] = low[i];
            d[2 * i + 1] = high[i];
        }
        return;
    }
    for (int k = 0; k < parts; ++k) {
        const Narrow* from = c.row<Narrow>(list[k]);
        if (c.mask == kFullMask) {
            for (int i = 0; i < kLanes; ++i) d[parts * i + k] = from[i];
        } else {
            each_lane(c.mask, [&](int i) { d[parts * i + k] = from[i]; });
        }
    }
}

template <class Wide, class Narrow>
void unpack(const Context& c) {
    constexpr int parts = sizeof(Wide) / sizeof(Narrow);
    const int32_t* list = c.list(c.inst.aux[0]) + 1;
    const Narrow* from = c.row<Narrow>(c.inst.s[0]);
    if (parts == 2 && c.mask == kFullMask && list[0] >= 0 && list[1] >= 0) {
        Narrow *low = c.out<Narrow>(list[0]), *high = c.out<Narrow>(list[1]);
#pragma GCC ivdep
        for (int i = 0; i < kLanes; ++i) {
            low[i] = from[2 * i];
            high[i] = from[2 * i + 1];
        }
        return;
    }
    for (int k = 0; k < parts; ++k) {
        if (list[k] < 0) continue;  // the sink `_`
        Narrow* d = c.out<Narrow>(list[k]);
        if (c.mask == kFullMask) {
            for (int i = 0; i < kLanes; ++i) d[i] = from[parts * i + k];
        } else {
            each_lane(c.mask, [&](int i) { d[i] = from[parts * i + k]; });
        }
    }
}

}  // namespace

// aux: 0 list, 1 bits of the wide row, 2 bits of each part. Little-endian rows make this a matter of interleaving.
Step op_pack(Context& c) {
    if (c.inst.aux[2] == 32) {
        c.inst.aux[1] == 64 ? pack<uint64_t, uint32_t>(c) : pack<unsigned __int128, uint32_t>(c);
    } else if (c.inst.aux[2] == 64) {
        pack<unsigned __int128, uint64_t>(c);
    } else {
        c.inst.aux[1] == 32 ? pack<uint32_t, uint16_t>(c) : pack<uint64_t, uint16_t>(c);
    }
    return Step::next;
}

Step op_unpack(Context& c) {
    if (c.inst.aux[2] == 32) {
        c.inst.aux[1] == 64 ? unpack<uint64_t, uint32_t>(c) : unpack<unsigned __int128, uint32_t>(c);
    } else if (c.inst.aux[2] == 64) {
        unpack<unsigned __int128, uint64_t>(c);
    } else {
        c.inst.aux[1] == 32 ? unpack<uint32_t, uint16_t>(c) : unpack<uint64_t, uint16_t>(c);
    }
    return Step::next;
}

// Width changes around a lane form whose register is wider than its type; aux: 0 bits from, 1 bits to, 2 sign-extend.
Step op_resize(Context& c) {
    auto move = [&](auto from_type, auto to_type) {
        const auto* from = c.row<decltype(from_type)>(c.inst.s[0]);
        auto* to = c.out<decltype(to_type)>(c.inst.d[0]);
        each_lane(c.mask, [&](int i) { to[i] = decltype(to_type)(from[i]); });
    };
    auto from_bits = [&](auto to_type) {
        bool is_signed = c.inst.aux[2] != 0;
        switch (c.inst.aux[0]) {
            case 16: return is_signed ? move(int16_t(), to_type) : move(uint16_t(), to_type);
            case 32: return is_signed ? move(int32_t(), to_type) : move(uint32_t(), to_type);
            default: return move(uint64_t(), to_type);
        }
    };
    switch (c.inst.aux[1]) {
        case 16: from_bits(uint16_t()); break;
        case 32: from_bits(uint32_t()); break;
        default: from_bits(uint64_t());
    }
    return Step::next;
}

// Complement of a predicate, for operands written `!p`.
Step op_not_predicate(Context& c) {
    *c.out<uint32_t>(c.inst.d[0]) = ~c.predicate(c.inst.s[0]);
    return Step::next;
}

// %clock and its relatives count executed instructions of the CTA; aux[0]: bits of the row.
Step op_clock(Context& c) {
    each_lane(kFullMask, [&](int lane) {
        if (c.inst.aux[0] == 64) {
            c.out<uint64_t>(c.inst.d[0])[lane] = uint64_t(c.cta.instructions);
        } else {
            c.out<uint32_t>(c.inst.d[0])[lane] = uint32_t(c.cta.instructions);
        }
    });
    return Step::next;
}

}  // namespace undertow
