// The run, and what Python calls.
#include <algorithm>

#include "model.hpp"

namespace timing {

constexpr double STANDSTILL = 100000.0;  // cycles without any progress: nothing ever will

Sm::Sm(const Input& input) : in_(input), random_(input.seed) {
    const double width = constant(Constant::shared_port_bytes_per_cycle);
    partitions_.resize(PARTITIONS);
    warps_.resize(in_.num_warps);
    for (int number = 0; number < in_.num_warps; ++number) {
        Warp& warp = warps_[number];
        warp.number = number;
        warp.at = in_.begins[number];
        warp.end = in_.begins[number + 1];
        warp.ready = constant(Constant::warp_start_spread) * random_.uniform();
        warp.registers.assign(in_.num_registers, 0.0);
        warp.writer.assign(in_.num_registers, NO_CAUSE);
        partitions_[number % PARTITIONS].warps.push_back(number);
        running_ += warp.at < warp.end;
    }
    tokens_.resize(in_.num_tokens);
    for (int i = 0; i < in_.num_tokens; ++i) tokens_[i].left = in_.tokens[i];
    mma_queues_.resize(in_.is_sm100 ? 1 : (in_.num_warps + WARPGROUP_WARPS - 1) / WARPGROUP_WARPS);
    stands_still_.assign(mma_queues_.size(), false);
    fetch_left_.assign(in_.num_operations, 0);
    joined_.assign(in_.num_operations, 0);
    done_at_.assign(in_.num_operations, NEVER);
    read_at_.assign(in_.num_operations, NEVER);
    issued_at_.assign(in_.num_operations, NEVER);
    for (int i = 0; i < in_.num_operations; ++i) {
        const Operation& operation = in_.operations[i];
        if (operation.engine <= static_cast<int>(Engine::tensor)) {
            fetch_left_[i] = static_cast<int>(operation.bytes / width + 0.999);
        }
    }
}

double Sm::run() {
    while (running_ > 0) {
        tensor_step();
        copies_step();
        port_step();
        issue_slots();
        now_ += 1.0;
        if (now_ - progress_ > STANDSTILL) return -1.0;
    }
    return std::max(now_, global_free_);  // stores have left the SM
}

}  // namespace timing

extern "C" double undertow_timing_replay(const timing::Input* input) { return timing::Sm(*input).run(); }
