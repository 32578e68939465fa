// Special registers: constants of a warp, written into rows when a CTA starts.
#pragma once

#include "cluster.hpp"

namespace undertow {

// Order is mirrored by encode.SPECIALS.
enum class Special : int {
    tid_x = 0, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z,
    laneid, warpid, nwarpid, lanemask_eq, lanemask_le, lanemask_lt, lanemask_ge, lanemask_gt,
    zero, one, dynamic_smem_size, total_smem_size, zero64, clusterid_x, clusterid_y,
    clusterid_z, nclusterid_x, nclusterid_y, nclusterid_z, cluster_ctaid_x, cluster_ctaid_y, cluster_ctaid_z,
    cluster_nctaid_x, cluster_nctaid_y, cluster_nctaid_z, cluster_ctarank, cluster_nctarank, is_explicit_cluster,
};

inline void write_specials(Cta& cta, Warp& warp) {
    const Launch& launch = cta.launch;
    for (const auto& [number, row] : launch.program->specials) {
        const auto special = Special(number);
        if (special == Special::zero64) {
            std::memset(warp.regs + row, 0, kLanes * 8);
            continue;
        }
        uint32_t* values = target<uint32_t>(warp.regs, row);
        for (int lane = 0; lane < kLanes; ++lane) {
            const int thread = warp.number * kLanes + lane;
            const int* block = launch.block;
            uint32_t value = 0;
            switch (special) {
                case Special::tid_x: value = uint32_t(thread % block[0]); break;
                case Special::tid_y: value = uint32_t(thread / block[0] % block[1]); break;
                case Special::tid_z: value = uint32_t(thread / block[0] / block[1]); break;
                case Special::ntid_x: case Special::ntid_y: case Special::ntid_z:
                    value = uint32_t(block[number - int(Special::ntid_x)]); break;
                case Special::ctaid_x: case Special::ctaid_y: case Special::ctaid_z:
                    value = uint32_t(cta.position[number - int(Special::ctaid_x)]); break;
                case Special::nctaid_x: case Special::nctaid_y: case Special::nctaid_z:
                    value = uint32_t(launch.grid[number - int(Special::nctaid_x)]); break;
                case Special::laneid: value = uint32_t(lane); break;
                case Special::warpid: value = uint32_t(warp.number); break;
                case Special::nwarpid: value = uint32_t(cta.warps.size()); break;
                case Special::lanemask_eq: value = 1u << lane; break;
                case Special::lanemask_le: value = (2u << lane) - 1; break;
                case Special::lanemask_lt: value = (1u << lane) - 1; break;
                case Special::lanemask_ge: value = ~((1u << lane) - 1); break;
                case Special::lanemask_gt: value = ~((2u << lane) - 1); break;
                case Special::clusterid_x: case Special::clusterid_y: case Special::clusterid_z:
                    value = uint32_t(cta.position[number - int(Special::clusterid_x)] /
                                     launch.cluster[number - int(Special::clusterid_x)]); break;
                case Special::nclusterid_x: case Special::nclusterid_y: case Special::nclusterid_z:
                    value = uint32_t(launch.grid[number - int(Special::nclusterid_x)] /
                                     launch.cluster[number - int(Special::nclusterid_x)]); break;
                case Special::cluster_ctaid_x: case Special::cluster_ctaid_y: case Special::cluster_ctaid_z:
                    value = uint32_t(cta.position[number - int(Special::cluster_ctaid_x)] %
                                     launch.cluster[number - int(Special::cluster_ctaid_x)]); break;
                case Special::cluster_nctaid_x: case Special::cluster_nctaid_y: case Special::cluster_nctaid_z:
                    value = uint32_t(launch.cluster[number - int(Special::cluster_nctaid_x)]); break;
                case Special::cluster_ctarank: value = uint32_t(cta.rank); break;
                case Special::cluster_nctarank: value = uint32_t(cta.cluster->ctas.size()); break;
                case Special::is_explicit_cluster: value = cta.cluster->ctas.size() > 1; break;
                case Special::one: value = 1; break;
                case Special::dynamic_smem_size: value = uint32_t(launch.dynamic_smem); break;
                case Special::total_smem_size: value = uint32_t(launch.shared_size); break;
                default: break;
            }
            values[lane] = value;
        }
    }
}

}  // namespace undertow
