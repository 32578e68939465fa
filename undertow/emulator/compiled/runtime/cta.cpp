// A thread block's life: poison, special registers, its place in the order of commits.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "machine.hpp"
#include "specials.hpp"

namespace undertow {

namespace {

char* allocate_rows(size_t num_bytes) {
    void* rows = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (!rows) throw std::bad_alloc();
    return static_cast<char*>(rows);
}

}  // namespace

Cta::Cta(Launch& launch_)
    : launch(launch_), num_threads(launch.block[0] * launch.block[1] * launch.block[2]),
      shared(launch.shared_base, launch.shared_size), engines(launch.completion, at),
      executions(size_t(launch.program->num_instructions)), registers_(nullptr, std::free) {
    const Program& program = *launch.program;
    const int num_warps = (num_threads + kLanes - 1) / kLanes;
    registers_.reset(allocate_rows(size_t(num_warps) * size_t(program.regs_bytes)));
    for (int w = 0; w < num_warps; ++w) {
        Warp warp;
        warp.number = w;
        const int left = num_threads - w * kLanes;
        warp.members = left >= kLanes ? kFullMask : (1u << left) - 1;
        warp.regs = registers_.get() + int64_t(w) * program.regs_bytes;
        warps.push_back(std::move(warp));
    }
    local.resize(size_t(num_warps) * kLanes * size_t(std::max<int64_t>(program.local_bytes, 16)));
}

void Cta::reset(int number_, int place_) {
    number = number_;
    place = place_;
    position[0] = number % launch.grid[0];
    position[1] = number / launch.grid[0] % launch.grid[1];
    position[2] = number / launch.grid[0] / launch.grid[1];
    const Program& program = *launch.program;
    for (Warp& warp : warps) {
        std::memset(warp.regs, kPoisonByte, size_t(program.regs_bytes));
        std::memset(warp.regs, 0, size_t(program.predicate_bytes));
        write_specials(*this, warp);
        warp.groups.assign(1, Group{0, warp.members, {}});
        warp.barrier_tokens.clear();
    }
    shared.reset();
    tmem.reset();
    std::fill(local.begin(), local.end(), kPoisonByte);
    engines.reset(launch.completion_seed * 1000003 + uint64_t(number));
    random.seed(launch.schedule_seed * 1000003 + uint64_t(number));
    barriers.clear();
    warpgroups.assign((warps.size() + kGroupWarps - 1) / kGroupWarps, Warpgroup{});
    last_mma.assign(warpgroups.size(), nullptr);
    reductions.clear();
    progress = polls = 0;
    at = Place{};
    at.cta = number;
    has_turn_ = false;
}

bool Cta::finished() const {
    return std::all_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.groups.empty(); });
}

int64_t Cta::live_warps() const {
    return std::count_if(warps.begin(), warps.end(), [](const Warp& warp) { return !warp.groups.empty(); });
}

void Cta::note(int32_t instruction, int64_t value) {
    const std::pair<int32_t, int64_t> fact{instruction, value};
    if (std::find(notes.begin(), notes.end(), fact) == notes.end()) notes.push_back(fact);
}

Buffer& Cta::global_buffer(uint64_t low, uint64_t high_end, uint64_t size) {
    if (last_buffer_ && last_buffer_->base <= low && high_end <= last_buffer_->end) return *last_buffer_;
    last_buffer_ = &launch.global.find(low, size);
    return *last_buffer_;
}

bool Cta::take_turn() {
    if (has_turn_ || !launch.commits) return true;
    if (!launch.commits->is_turn(size_t(place))) return false;
    for (const Reduction& reduction : reductions) reduction.commit();
    reductions.clear();
    has_turn_ = true;
    return true;
}

void Cta::wait_for_turn() {
    if (take_turn()) return;
    if (!launch.commits->wait_for_turn(size_t(place))) throw Fault{FaultKind::none, "stopped by a fault elsewhere", ""};
    take_turn();
}

void Cta::reduce_global(Buffer& buffer, uint64_t offset, const uint8_t* data, uint64_t num_bytes, int op, int type) {
    if (launch.commits) buffer.is_reduced.store(true, std::memory_order_relaxed);
    if (take_turn()) {
        reduce_bytes(buffer.host + offset, data, num_bytes, AtomicOp(op), AtomicType(type));
        return;
    }
    reductions.push_back(
        Reduction{&buffer, offset, AtomicOp(op), AtomicType(type), std::vector<uint8_t>(data, data + num_bytes)});
}

}  // namespace undertow
