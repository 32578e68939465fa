// Four warps that multiply together: see undertow/emulator/warpgroup.py, which says what is promised.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fault.hpp"

namespace undertow {

constexpr int kGroupWarps = 4;
constexpr Rule kPartialGroup{"partial-warpgroup"};

// One MMA that not all four warps have issued yet.
struct GatheringMma {
    int32_t instruction;
    std::array<uint64_t, 3> operands;  // descriptors of A (0: registers) and B, scale-d
    int64_t number;                    // how many MMAs of the warpgroup came before it
    int line;                          // of the PTX
    uint32_t warps;                    // those that have issued it, one bit each
};

// Of one warp: MMAs issued so far, and how many of them each committed group ends with.
struct WarpProgress {
    int64_t issued = 0;
    std::vector<int64_t> groups;

    // MMAs that must be complete so that at most `limit` groups are not.
    int64_t needed(uint64_t limit) const { return groups.size() > limit ? groups[groups.size() - 1 - limit] : 0; }
};

struct Warpgroup {
    std::array<WarpProgress, kGroupWarps> warps;
    std::deque<GatheringMma> gathering;
    int64_t complete = 0;

    // Every MMA must have been issued by all four warps when the CTA ends.
    void check_end(int number) const {
        if (gathering.empty()) return;
        std::string missing;
        for (int w = 0; w < kGroupWarps; ++w) {
            if (gathering.front().warps >> w & 1) continue;
            missing += (missing.empty() ? "" : ", ") + std::to_string(kGroupWarps * number + w);
        }
        fail(FaultKind::protocol, kPartialGroup,
             "wgmma.mma_async at PTX line %d was never executed by warps [%s] of warpgroup %d", gathering.front().line,
             missing.c_str(), number);
    }
    void commit(int warp) {
        WarpProgress& progress = warps[size_t(warp)];
        auto& groups = progress.groups;
        groups.erase(std::remove_if(groups.begin(), groups.end(), [&](int64_t end) { return end <= complete; }),
                     groups.end());
        groups.push_back(progress.issued);
    }
    int64_t open_count(int warp) const {
        const auto& groups = warps[size_t(warp)].groups;
        return std::count_if(groups.begin(), groups.end(), [&](int64_t end) { return end > complete; });
    }
};

}  // namespace undertow
