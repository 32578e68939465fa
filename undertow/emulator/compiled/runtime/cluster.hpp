// CTAs that run side by side and reach each other's shared memory: see undertow/emulator/cluster.py.
#pragma once

#include "machine.hpp"

namespace undertow {

constexpr int kRankShift = 24;
constexpr uint64_t kAddressMask = (uint64_t(1) << kRankShift) - 1;
constexpr int64_t kClusterBarrier = 16;
constexpr int kMaxCluster = 16;

struct Cluster {
    std::vector<std::unique_ptr<Cta>> ctas;  // by rank
    NamedBarrier barrier;                    // of barrier.cluster
    Cta* current = nullptr;                  // whose turn it is

    void reset(const int32_t* numbers, int place);
    int64_t progress() const;
    int64_t polls() const;
    int64_t instructions() const;
    int64_t live_warps() const;
    bool finished() const;
    // Something happened that any warp of any CTA may wait for.
    void stir() {
        for (auto& cta : ctas) cta->progress += 1;
    }
    // The CTA of a rank, for access to its shared memory.
    Cta& member(int64_t rank);
};

// A CTA's shared memory and an address there.
struct SharedPlace {
    Cta& home;
    uint64_t address;
};
SharedPlace locate(Cta& cta, uint64_t address);

// CTAs that a copy goes to, with the addresses there of its data and of its mbarrier.
struct Destinations {
    std::array<Cta*, kMaxCluster> homes;
    int count;
    uint64_t target, barrier;
};
// `ranks`: mask of a multicast, or negative.
Destinations destinations(Cta& cta, uint64_t target, uint64_t barrier, int64_t ranks);

NamedBarrier& barrier_of(Cta& cta, int64_t id);
int64_t live_warps_of(Cta& cta, int64_t id);

// Runs a cluster to its end, or returns false when it only polls. Throws Fault; `current->at` then says where.
bool run_cluster(Cluster& cluster);

}  // namespace undertow
