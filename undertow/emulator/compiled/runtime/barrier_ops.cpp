// mbarriers, named barriers, fences and other synchronisation: see semantics/mbarrier.py and semantics/barriers.py.
#include <map>

#include "cluster.hpp"
#include "memory_ops.hpp"

namespace undertow {

using ull = unsigned long long;

uint64_t shared_address(uint64_t value) {
    return value - kSharedWindow < kWindowBytes ? value - kSharedWindow : value;
}

namespace {

// Shared addresses of the active lanes; aux[5] says whether the register has 64 bits.
struct LaneCells {
    explicit LaneCells(const Context& c) {
        lane_addresses(c, c.inst.s[0], c.inst.aux[5] != 0, c.inst.imm, address);
        each_lane(c.mask, [&](int lane) { address[lane] = shared_address(address[lane]); });
        is_common = true;
        each_lane(c.mask, [&](int lane) { is_common &= address[lane] == address[c.lane()]; });
    }
    uint64_t address[kLanes];
    bool is_common;
};

// The mbarrier at a shared::cluster address; what happens to it may wake warps of its own CTA.
Mbarrier& mbarrier_at(const Context& c, uint64_t address) {
    const SharedPlace place = locate(c.cta, address);
    place.home.progress += 1;
    return place.home.shared.mbarrier(place.address);
}

}  // namespace

// s: address, count.
Step op_mbarrier_init(Context& c) {
    LaneCells cells(c);
    const int64_t count = c.row<uint32_t>(c.inst.s[1])[c.lane()];
    uint64_t last = ~uint64_t(0);
    each_lane(c.mask, [&](int lane) {
        if (cells.address[lane] != last) c.cta.shared.init_mbarrier(cells.address[lane], count);
        last = cells.address[lane];
    });
    c.cta.progress += 1;
    return Step::next;
}

Step op_mbarrier_inval(Context& c) {
    LaneCells cells(c);
    uint64_t last = ~uint64_t(0);
    each_lane(c.mask, [&](int lane) {
        if (cells.address[lane] != last) c.cta.shared.inval_mbarrier(cells.address[lane]);
        last = cells.address[lane];
    });
    return Step::next;
}

// aux[0]: 0 expect_tx, 1 complete_tx; s: address, bytes.
Step op_mbarrier_tx(Context& c) {
    LaneCells cells(c);
    const uint32_t* bytes = c.row<uint32_t>(c.inst.s[1]);
    each_lane(c.mask, [&](int lane) {
        Mbarrier& cell = mbarrier_at(c, cells.address[lane]);
        c.inst.aux[0] ? cell.complete(bytes[lane]) : cell.expect(bytes[lane]);
    });
    c.cta.progress += 1;
    return Step::next;
}

// aux: 0 drop, 1 expects bytes, 2 has a count; s: address, count; d[0]: state token (or -1).
Step op_mbarrier_arrive(Context& c) {
    LaneCells cells(c);
    const bool drop = c.inst.aux[0], expects = c.inst.aux[1], has_count = c.inst.aux[2];
    uint64_t* tokens = c.inst.d[0] >= 0 ? c.out<uint64_t>(c.inst.d[0]) : nullptr;
    c.cta.progress += 1;
    if (!has_count && cells.is_common) {
        Mbarrier& cell = mbarrier_at(c, cells.address[c.lane()]);
        uint64_t token = uint64_t(cell.phase) << 32 | uint64_t(cell.pending);
        cell.arrive(__builtin_popcount(c.mask), drop);
        if (tokens) each_lane(c.mask, [&](int lane) { tokens[lane] = token; });
        return Step::next;
    }
    const uint32_t* counts = has_count ? c.row<uint32_t>(c.inst.s[1]) : nullptr;
    each_lane(c.mask, [&](int lane) {
        Mbarrier& cell = mbarrier_at(c, cells.address[lane]);
        uint64_t token = uint64_t(cell.phase) << 32 | uint64_t(cell.pending);
        int64_t amount = counts ? counts[lane] : 1;
        if (expects) {
            cell.expect(amount);
            amount = 1;
        }
        cell.arrive(amount, drop);
        if (tokens) tokens[lane] = token;
    });
    return Step::next;
}

// aux: 0 by parity, 1 may block; s: address, key (u32 parity or u64 token); d[0]: predicate.
Step op_mbarrier_wait(Context& c) {
    LaneCells cells(c);
    const bool by_parity = c.inst.aux[0], may_block = c.inst.aux[1];
    auto key = [&](int lane) -> int64_t {
        if (!by_parity) return int64_t(c.row<uint64_t>(c.inst.s[1])[lane] >> 32);
        uint32_t parity = c.row<uint32_t>(c.inst.s[1])[lane];
        if (parity > 1) c.cta.note(c.inst.index, parity);
        return parity & 1;
    };
    uint32_t done = 0;
    bool same_key = true;
    const int64_t first_key = key(c.lane());
    each_lane(c.mask, [&](int lane) {
        int64_t k = key(lane);
        same_key &= k == first_key;
        const Mbarrier& cell = c.cta.shared.mbarrier(cells.address[lane]);
        done |= uint32_t(by_parity ? cell.has_completed(k) : cell.phase > k) << lane;
    });
    if (!done && may_block && !c.group.wait.expired) {
        Wait wait;
        wait.kind = WaitKind::mbarrier;
        wait.subject = cells.address[c.lane()];
        wait.argument = first_key;
        wait.by_parity = by_parity;
        wait.can_expire = true;
        if (!cells.is_common || !same_key) {
            each_lane(c.mask, [&](int lane) { wait.others.emplace_back(cells.address[lane], key(lane)); });
        }
        c.group.wait = wait;
        return Step::blocked;
    }
    if (!done) c.cta.polls += may_block;
    c.group.wait.expired = false;
    uint32_t& d = *c.out<uint32_t>(c.inst.d[0]);
    d = (d & ~c.mask) | done;
    return Step::next;
}

void complete_barrier(Cta& cta, NamedBarrier& barrier) {
    barrier.generation += 1;
    barrier.arrived = 0;
    barrier.result = barrier.reduction;
    barrier.reduction = 0;
    cta.cluster->stir();
}

void check_whole_warp(const Context& c) {
    if (c.warp.live_mask() & ~c.group.mask) {
        fail(FaultKind::protocol, kPartialWarp, "barrier reached by lanes 0x%08x of warp %d only", c.group.mask,
             c.warp.number);
    }
    if (c.mask != c.group.mask) {
        fail(FaultKind::protocol, kPartialWarp,
             "barrier guarded by a predicate that is false in some lanes of a warp");
    }
}

namespace {

constexpr Rule kCountRule{"named-barrier-count"};

std::string count_or_all(int64_t threads) { return threads ? std::to_string(threads) : "all"; }

void arrive(const Context& c, int64_t id, int64_t threads) {
    if (threads % kLanes) {
        fail(FaultKind::protocol, "barrier %lld for %lld threads; allowed are multiples of 32", (long long)id,
             (long long)threads);
    }
    NamedBarrier& barrier = barrier_of(c.cta, id);
    if (barrier.arrived && barrier.expected != threads) {
        fail(FaultKind::protocol, kCountRule, "barrier %lld: warp %d expects %s threads, warps already there expect %s",
             (long long)id, c.warp.number, count_or_all(threads).c_str(), count_or_all(barrier.expected).c_str());
    }
    barrier.expected = threads;
    barrier.arrived += kLanes;
    int64_t needed = threads ? threads : live_warps_of(c.cta, id) * kLanes;
    if (barrier.arrived > needed) {
        fail(FaultKind::protocol, kCountRule, "barrier %lld: %lld threads arrived, %lld expected", (long long)id,
             (long long)barrier.arrived, (long long)needed);
    }
    if (barrier.arrived == needed) complete_barrier(c.cta, barrier);
}

// Folds a warp's predicate into the round of bar.red; op: 0 popc, 1 and, 2 or.
void reduce(const Context& c, NamedBarrier& barrier, int op, uint32_t chosen) {
    const bool is_first = barrier.arrived == 0;
    if (op == 0) {
        barrier.reduction = (is_first ? 0 : barrier.reduction) + __builtin_popcount(chosen);
    } else if (op == 1) {
        barrier.reduction = (is_first || barrier.reduction) && chosen == c.mask;
    } else {
        barrier.reduction = (!is_first && barrier.reduction) || chosen != 0;
    }
}

int64_t barrier_number(const Context& c) {
    const int64_t id = c.row<uint32_t>(c.inst.s[0])[c.lane()];
    if (id >= kClusterBarrier) fail(FaultKind::protocol, "barrier %lld; allowed are 0 to 15", (long long)id);
    return id;
}

Step wait_for_barrier(Context& c, int64_t id, int64_t generation) {
    Wait wait;
    wait.kind = WaitKind::barrier;
    wait.subject = uint64_t(id);
    wait.argument = generation;
    c.group.wait = wait;
    return Step::blocked;
}

}  // namespace

// aux: 0 has a thread count, 1 reduction (-1 none, 0 popc, 1 and, 2 or); s: barrier, threads, predicate; d: result.
Step op_barrier_sync(Context& c) {
    check_whole_warp(c);
    const int64_t id = barrier_number(c);
    auto token = c.warp.barrier_tokens.find(c.inst.index);
    const bool arrives_now = token == c.warp.barrier_tokens.end();
    if (arrives_now) {
        const int64_t threads = c.inst.aux[0] ? c.row<uint32_t>(c.inst.s[1])[c.lane()] : 0;
        if (c.inst.aux[0] && threads == 0) fail(FaultKind::protocol, "barrier %lld for 0 threads", (long long)id);
        NamedBarrier& barrier = c.cta.barriers[id];
        if (c.inst.aux[1] >= 0) reduce(c, barrier, c.inst.aux[1], c.predicate(c.inst.s[2]) & c.mask);
        const int64_t generation = barrier.generation;
        token = c.warp.barrier_tokens.insert({c.inst.index, {int(id), generation}}).first;
        arrive(c, id, threads);
    }
    const auto [number, generation] = token->second;
    NamedBarrier& barrier = c.cta.barriers[number];
    if (barrier.generation == generation) return wait_for_barrier(c, number, generation);
    c.warp.barrier_tokens.erase(token);
    if (c.inst.aux[1] == 0) {
        uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
        each_lane(c.mask, [&](int lane) { d[lane] = uint32_t(barrier.result); });
    } else if (c.inst.aux[1] > 0) {
        uint32_t& d = *c.out<uint32_t>(c.inst.d[0]);
        d = (d & ~c.mask) | (barrier.result ? c.mask : 0);
    }
    return arrives_now ? Step::yield : Step::next;  // warps that came earlier go on earlier
}

Step op_barrier_arrive(Context& c) {
    check_whole_warp(c);
    arrive(c, barrier_number(c), c.row<uint32_t>(c.inst.s[1])[c.lane()]);
    return Step::next;
}

// A split barrier over all threads of the cluster.
Step op_cluster_arrive(Context& c) {
    check_whole_warp(c);
    c.warp.barrier_tokens[-1] = {int(kClusterBarrier), c.cta.cluster->barrier.generation};
    arrive(c, kClusterBarrier, 0);
    return Step::next;
}

Step op_cluster_wait(Context& c) {
    auto token = c.warp.barrier_tokens.find(-1);
    if (token == c.warp.barrier_tokens.end()) {
        fail(FaultKind::protocol, "barrier.cluster.wait without barrier.cluster.arrive");
    }
    const int64_t generation = token->second.second;
    if (c.cta.cluster->barrier.generation == generation) {
        return wait_for_barrier(c, kClusterBarrier, generation);
    }
    c.warp.barrier_tokens.erase(token);
    return Step::next;
}

Step op_nothing(Context&) { return Step::next; }

Step op_zero(Context& c) {
    uint64_t* d = c.out<uint64_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = 0; });
    return Step::next;
}

Step op_pending_count(Context& c) {
    const uint64_t* state = c.row<uint64_t>(c.inst.s[0]);
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) { d[lane] = uint32_t(state[lane]); });
    return Step::next;
}

Step op_setmaxnreg(Context& c) {
    const uint32_t value = c.row<uint32_t>(c.inst.s[0])[c.lane()];
    if (value % 8 || value < 24 || value > 256) {
        fail(FaultKind::protocol, "setmaxnreg to %u registers; allowed are multiples of 8 from 24 to 256", value);
    }
    if (c.group.mask != kFullMask) {
        fail(FaultKind::protocol, Rule{"register-pool"}, "setmaxnreg executed by part of a warp");
    }
    return Step::next;
}

}  // namespace undertow
