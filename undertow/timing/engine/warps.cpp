// Issue: each partition gives its slot to one warp per cycle; a warp issues in order.
#include <algorithm>

#include "model.hpp"

namespace timing {

bool Sm::blocked(Warp& warp, Reason reason, int32_t cause, double until) {
    warp.blame = reason;
    warp.cause = cause;
    if (until > warp.ready) warp.ready = until;
    return false;
}

bool Sm::held(Warp& warp, double cycles, Reason reason) {
    warp.ready = now_ + std::max(cycles, 1.0);
    warp.blame = reason;
    warp.cause = warp.at;
    return true;
}

void Sm::write(Warp& warp, const Uop& uop, double time) {
    for (int i = uop.write_begin; i < uop.write_end; ++i) {
        warp.registers[in_.pool[i]] = time;
        warp.writer[in_.pool[i]] = warp.at;
    }
}

bool Sm::reads_ready(Warp& warp, const Uop& uop) {
    for (int i = uop.read_begin; i < uop.read_end; ++i) {
        const int name = in_.pool[i];
        const double time = warp.registers[name];
        if (!past(time)) return blocked(warp, Reason::data, warp.writer[name], time == NEVER ? 0.0 : time);
    }
    return true;
}

void Sm::issue_slots() {
    const bool oldest_first = constant(Constant::oldest_first_issue) > 0.5;
    for (Partition& partition : partitions_) {
        if (!past(partition.slot_free)) continue;
        const int count = static_cast<int>(partition.warps.size());
        int issued = -1;
        if (partition.last >= 0 && try_issue(warps_[partition.last], partition)) issued = partition.last;
        for (int i = 0; i < count && issued < 0; ++i) {
            const int number = partition.warps[oldest_first ? i : count - 1 - i];
            if (number != partition.last && try_issue(warps_[number], partition)) issued = number;
        }
        if (issued < 0) continue;
        partition.last = issued;
        for (const int number : partition.warps) {
            Warp& warp = warps_[number];
            if (number != issued && warp.at < warp.end && past(warp.ready) && warp.since < 0.0) ++warp.slots_lost;
        }
    }
}

bool Sm::try_issue(Warp& warp, Partition& partition) {
    if (warp.at >= warp.end || !past(warp.ready)) return false;
    const int entry = warp.at;
    const Uop& uop = in_.uops[in_.uop[entry]];
    if (warp.since < 0.0 && !reads_ready(warp, uop)) return false;
    const Reason blame = warp.blame;  // what `dispatch` may overwrite with the reason for the next instruction
    const int32_t cause = warp.cause;
    const double before = warp.ready;
    if (!dispatch(warp, partition, uop, in_.argument[entry])) return false;
    const bool was_waiting = warp.since >= 0.0;
    const bool lost = entry > in_.begins[warp.number] && 2.0 * warp.slots_lost > now_ - in_.issued[entry - 1] - 1.0;
    in_.issued[entry] = now_;
    in_.reason[entry] = static_cast<int8_t>(lost ? Reason::slot : blame);
    in_.cause[entry] = lost ? NO_CAUSE : cause;
    warp.slots_lost = 0;
    if (warp.ready <= now_) warp.ready = now_ + uop.issues;
    if (warp.ready == before || was_waiting) warp.blame = Reason::none, warp.cause = NO_CAUSE;
    warp.since = -1.0;
    warp.resume = NEVER;
    partition.slot_free = now_ + uop.issues;
    progress_ = now_;
    if (random_.uniform() < constant(Constant::stall_probability)) {
        warp.ready += constant(Constant::stall_cycles);
        warp.blame = Reason::stall;
        warp.cause = NO_CAUSE;
    }
    if (++warp.at >= warp.end) --running_;
    return true;
}

bool Sm::dispatch(Warp& warp, Partition& partition, const Uop& uop, int argument) {
    switch (static_cast<Kind>(uop.kind)) {
        case Kind::arithmetic: return arithmetic(warp, partition, uop);
        case Kind::branch:
            return argument == 1 ? held(warp, constant(Constant::taken_branch_cycles), Reason::branch) : true;
        case Kind::load:
        case Kind::store: {
            if (partition.requests.size() >= constant(Constant::lsu_queue_depth)) {
                return blocked(warp, Reason::queue, NO_CAUSE);
            }
            const bool is_load = uop.kind == static_cast<int>(Kind::load);
            const double rate = constant(Constant::shared_load_registers_per_cycle);
            const int passes = std::max(argument, is_load ? static_cast<int>(uop.amount / rate + 0.5) : 1);
            partition.requests.push_back({warp.number, warp.at, std::max(passes, 1), uop.kind});
            if (is_load) write(warp, uop, NEVER);
            else ++warp.stores_pending;
            return true;
        }
        case Kind::global: return global_access(warp, uop, std::max(argument, 0));
        case Kind::arrive:
            if (argument >= 0) partition.requests.push_back({warp.number, warp.at, 0, uop.kind});
            return held(warp, constant(Constant::mbarrier_arrive_cycles));
        case Kind::ask: write(warp, uop, now_); return true;
        case Kind::wait: return wait_token(warp, uop, argument, false);
        case Kind::barrier_arrive:
            if (argument >= 0) contribute(argument, now_, warp.at);
            return held(warp, constant(Constant::named_barrier_arrive_cycles));
        case Kind::barrier_sync:
            if (argument >= 0 && warp.since < 0.0) contribute(argument, now_, warp.at);
            return argument < 0 || wait_token(warp, uop, argument, true);
        case Kind::wgmma: return issue_wgmma(warp, argument);
        case Kind::wgmma_wait: return wait_mma(warp, argument);
        case Kind::mma: return issue_tcgen05(warp, argument, false);
        case Kind::commit: return issue_tcgen05(warp, argument, true);
        case Kind::tmem_load:
        case Kind::tmem_store: return tensor_memory(warp, partition, uop);
        case Kind::tmem_wait_load:
            return past(warp.tmem_loads_done) || blocked(warp, Reason::tmem, warp.at, warp.tmem_loads_done);
        case Kind::tmem_wait_store:
            return past(warp.tmem_stores_done) || blocked(warp, Reason::tmem, warp.at, warp.tmem_stores_done);
        case Kind::copy:
            if (argument >= 0) issue_copy(warp, argument);
            return held(warp, constant(Constant::tma_issue_cycles));
        case Kind::copy_wait: return wait_copy(warp, argument, uop.amount == 1);
        case Kind::fence: return fence(warp, constant(Constant::shared_fence_cycles));
        case Kind::device_fence: return fence(warp, constant(Constant::device_fence_cycles));
        case Kind::reallocate: return held(warp, constant(Constant::register_reallocation_cycles));
        case Kind::warp_sync: return held(warp, constant(Constant::warp_sync_cycles));
        default: return true;
    }
}

bool Sm::arithmetic(Warp& warp, Partition& partition, const Uop& uop) {
    const auto unit = static_cast<Unit>(uop.unit);
    const bool beside = tensor_is_busy();
    double interval = 0.0, latency = constant(Constant::arithmetic_latency);
    int pipe = uop.unit;
    switch (unit) {
        case Unit::fma:
            interval = constant(beside ? Constant::fma_interval_beside_mma : Constant::fma_interval);
            break;
        case Unit::packed_fma:
            interval = constant(Constant::packed_fma_interval);
            pipe = static_cast<int>(Unit::fma);
            break;
        case Unit::alu: interval = constant(Constant::alu_interval); break;
        case Unit::predicate:
            interval = constant(Constant::alu_interval);
            latency = constant(Constant::predicate_latency);
            pipe = static_cast<int>(Unit::alu);
            break;
        case Unit::multiply: interval = constant(Constant::integer_multiply_interval); break;
        case Unit::mufu:
            interval = constant(beside ? Constant::mufu_interval_beside_mma : Constant::mufu_interval);
            latency = constant(Constant::mufu_latency);
            break;
        case Unit::convert:
            interval = constant(Constant::convert_interval);
            if (constant(Constant::convert_shares_alu) > 0.5) pipe = static_cast<int>(Unit::alu);
            break;
        case Unit::special: latency = constant(Constant::special_register_latency); break;
        case Unit::collective: latency = constant(Constant::collective_latency); break;
        case Unit::uniform: latency = constant(Constant::uniform_latency); break;
        case Unit::shuffle:
            interval = constant(Constant::lsu_pass_interval);
            latency = constant(Constant::shuffle_latency);
            break;
        default: break;
    }
    double& free = partition.units[pipe];
    if (!past(free)) return blocked(warp, Reason::pipe, NO_CAUSE, free);
    free = std::max(free, now_) + interval * uop.issues;
    if (beside && (unit == Unit::fma || unit == Unit::packed_fma)) {
        execute_end_ += constant(Constant::mma_delay_per_fma);
    }
    write(warp, uop, now_ + latency + uop.issues - 1);
    return true;
}

}  // namespace timing
