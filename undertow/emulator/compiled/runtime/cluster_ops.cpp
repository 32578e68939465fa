// Clusters, mapa, getctarank, st.async and red.async: see cluster.py and semantics/cluster.py.
#include <cstring>

#include "atomics.hpp"
#include "cluster.hpp"
#include "operands.hpp"

namespace undertow {

void Cluster::reset(const int32_t* numbers, int place) {
    barrier = NamedBarrier{};
    for (size_t rank = 0; rank < ctas.size(); ++rank) {
        ctas[rank]->cluster = this;
        ctas[rank]->rank = int(rank);
        ctas[rank]->reset(numbers[rank], place + int(rank));
    }
    current = ctas.front().get();
}

int64_t Cluster::progress() const {
    int64_t sum = 0;
    for (const auto& cta : ctas) sum += cta->progress;
    return sum;
}

int64_t Cluster::polls() const {
    int64_t sum = 0;
    for (const auto& cta : ctas) sum += cta->polls;
    return sum;
}

int64_t Cluster::instructions() const {
    int64_t sum = 0;
    for (const auto& cta : ctas) sum += cta->instructions;
    return sum;
}

int64_t Cluster::live_warps() const {
    int64_t sum = 0;
    for (const auto& cta : ctas) sum += cta->live_warps();
    return sum;
}

bool Cluster::finished() const {
    for (const auto& cta : ctas) {
        if (!cta->finished()) return false;
    }
    return true;
}

Cta& Cluster::member(int64_t rank) {
    if (rank < 0 || rank >= int64_t(ctas.size())) {
        fail(FaultKind::protocol, "CTA rank %lld in a cluster of %zu", (long long)rank, ctas.size());
    }
    Cta& cta = *ctas[size_t(rank)];
    if (cta.finished()) {
        fail(FaultKind::protocol, Rule{"cluster-exit"},
             "access to the shared memory of CTA rank %lld, which has exited", (long long)rank);
    }
    return cta;
}

SharedPlace locate(Cta& cta, uint64_t address) {
    const int64_t rank = int64_t(address >> kRankShift) - 1;
    if (rank < 0 || rank == cta.rank) return {cta, address & kAddressMask};
    return {cta.cluster->member(rank), address & kAddressMask};
}

Destinations destinations(Cta& cta, uint64_t target, uint64_t barrier, int64_t ranks) {
    const SharedPlace data = locate(cta, shared_address(target)), word = locate(cta, shared_address(barrier));
    if (&data.home != &word.home) {
        fail(FaultKind::protocol, "a copy to the shared memory of one CTA with an mbarrier of another");
    }
    Destinations to{{}, 0, data.address, word.address};
    if (ranks < 0) {
        to.homes[size_t(to.count++)] = &data.home;
    } else {
        for (int rank = 0; rank < kMaxCluster; ++rank) {
            if (ranks >> rank & 1) to.homes[size_t(to.count++)] = &cta.cluster->member(rank);
        }
    }
    for (int i = 0; i < to.count; ++i) to.homes[size_t(i)]->shared.mbarrier(to.barrier);
    return to;
}

NamedBarrier& barrier_of(Cta& cta, int64_t id) {
    return id == kClusterBarrier ? cta.cluster->barrier : cta.barriers[id];
}

int64_t live_warps_of(Cta& cta, int64_t id) {
    return id == kClusterBarrier ? cta.cluster->live_warps() : cta.live_warps();
}

// aux: 0 generic address, 1 bits; s: address, rank; d: address.
Step op_mapa(Context& c) {
    const uint64_t base = c.inst.aux[0] ? kSharedWindow : 0;
    const uint32_t* ranks = c.row<uint32_t>(c.inst.s[1]);
    const auto size = c.cta.cluster->ctas.size();
    each_lane(c.mask, [&](int lane) {
        if (ranks[lane] >= size) {
            fail(FaultKind::protocol, "mapa to CTA rank %u in a cluster of %zu", ranks[lane], size);
        }
        const bool is_wide = c.inst.aux[1] == 64;
        const uint64_t address = is_wide ? c.row<uint64_t>(c.inst.s[0])[lane] : c.row<uint32_t>(c.inst.s[0])[lane];
        const uint64_t offset = shared_address(address) & kAddressMask;
        const bool is_own = int(ranks[lane]) == c.cta.rank;
        const uint64_t value = base + (is_own ? offset : uint64_t(ranks[lane] + 1) << kRankShift | offset);
        if (is_wide) {
            c.out<uint64_t>(c.inst.d[0])[lane] = value;
        } else {
            c.out<uint32_t>(c.inst.d[0])[lane] = uint32_t(value);
        }
    });
    return Step::next;
}

// aux: 0 bits of the address; s: address; d: rank.
Step op_getctarank(Context& c) {
    uint32_t* d = c.out<uint32_t>(c.inst.d[0]);
    each_lane(c.mask, [&](int lane) {
        const uint64_t address =
            c.inst.aux[0] == 64 ? c.row<uint64_t>(c.inst.s[0])[lane] : c.row<uint32_t>(c.inst.s[0])[lane];
        const int64_t rank = int64_t(shared_address(address) >> kRankShift) - 1;
        d[lane] = uint32_t(rank < 0 ? c.cta.rank : rank);
    });
    return Step::next;
}

// Per lane. Operands: address, mbarrier, values. aux: 0 bytes of an element, 1 AtomicOp | AtomicType << 8 or -1.
Step op_remote_store(Context& c) {
    const uint64_t size = uint64_t(c.inst.aux[0]);
    const int reduction = c.inst.aux[1];
    const uint64_t count = uint64_t(c.list(c.inst.aux[6])[0] / 3 - 2);
    Cta& cta = c.cta;
    each_lane(c.mask, [&](int lane) {
        const Operands v = lane_operands(c, lane);
        const SharedPlace data = locate(cta, shared_address(v[0])), word = locate(cta, shared_address(v[1]));
        if (&data.home != &word.home) {
            fail(FaultKind::protocol, "%s.async: data and mbarrier lie in different CTAs", reduction < 0 ? "st" : "red");
        }
        Cta* home = &data.home;
        auto run = [home, v, size, count, reduction, target = data.address, barrier = word.address] {
            SharedMemory& shared = home->shared;
            const uint64_t bytes = size * count;
            if (shared.near_cells(target, target + bytes) && shared.covers_cell(target, bytes)) {
                fail(FaultKind::memory, "ordinary access of %llu bytes at %#llx touches an mbarrier",
                     (unsigned long long)bytes, (unsigned long long)target);
            }
            if (target < shared.base() || target + bytes > shared.end()) {
                fail(FaultKind::memory, "%llu bytes at %#llx are outside shared memory [%#llx, %#llx)",
                     (unsigned long long)bytes, (unsigned long long)target, (unsigned long long)shared.base(),
                     (unsigned long long)shared.end());
            }
            if (target % bytes) {
                fail(FaultKind::memory, "%llu bytes at %#llx in shared memory are not aligned to their size",
                     (unsigned long long)bytes, (unsigned long long)target);
            }
            uint8_t values[32];
            for (uint64_t i = 0; i < count; ++i) std::memcpy(values + i * size, &v[2 + i], size);
            if (reduction < 0) {
                std::memcpy(shared.at(target), values, bytes);
            } else {
                reduce_bytes(shared.at(target), values, bytes, AtomicOp(reduction & 0xff), AtomicType(reduction >> 8));
            }
            shared.mbarrier(barrier).complete(int64_t(bytes));
            home->progress += 1;
        };
        cta.engines.issue(Engine::bulk_load, c.thread(lane), run);
    });
    return Step::next;
}

}  // namespace undertow
