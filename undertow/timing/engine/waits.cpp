// What a warp waits for, and what it hands to the engines.
#include <algorithm>

#include "model.hpp"

namespace timing {

void Sm::contribute(int token, double time, int32_t cause) {
    Token& of = tokens_[token];
    if (time >= of.at) {
        of.at = time;
        of.cause = cause;
    }
    if (--of.left == 0) {
        in_.token_at[token] = of.at;
        in_.token_cause[token] = of.cause;
    }
}

// A named barrier, or the branch on the answer of a try_wait, which was asked when it wrote the branch's predicate.
bool Sm::wait_token(Warp& warp, const Uop& uop, int token, bool is_barrier) {
    if (warp.since < 0.0) warp.since = now_;
    double answer = now_;
    if (!is_barrier && uop.read_begin < uop.read_end) {
        answer = warp.registers[in_.pool[uop.read_begin]] + constant(Constant::mbarrier_ready_wait);
    }
    if (warp.resume == NEVER) {
        if (token < 0) {
            warp.resume = answer;
            blocked(warp, Reason::hold, warp.at);
        } else {
            Token& of = tokens_[token];
            if (of.left > 0) return blocked(warp, is_barrier ? Reason::barrier : Reason::mbarrier, NO_CAUSE);
            double wake = of.at;
            if (is_barrier) {
                wake += constant(Constant::named_barrier_latency)
                    + constant(Constant::named_barrier_release_interval) * of.released++;
            } else {
                wake += constant(Constant::mbarrier_wake_latency)
                    + constant(Constant::wake_jitter) * (random_.uniform() - 0.5);
            }
            warp.resume = std::max(is_barrier ? warp.since : answer, wake);
            const bool was_late = of.at > warp.since;
            const Reason reason = is_barrier ? Reason::barrier : was_late ? Reason::mbarrier : Reason::hold;
            blocked(warp, reason, was_late || is_barrier ? of.cause : warp.at);
        }
        warp.ready = std::max(warp.ready, warp.resume);
    }
    return past(warp.resume);
}

bool Sm::wait_mma(Warp& warp, int operation) {
    if (operation < 0) return true;
    if (warp.since < 0.0) warp.since = now_;
    const double done = done_at_[operation] + constant(Constant::wgmma_tail);
    if (past(done)) return true;
    return blocked(warp, Reason::mma, of_operation(operation), done == NEVER ? 0.0 : done);
}

bool Sm::wait_copy(Warp& warp, int operation, bool reads_only) {
    if (operation < 0) return true;
    if (warp.since < 0.0) warp.since = now_;
    const double done = reads_only ? read_at_[operation] : done_at_[operation];
    if (past(done)) return true;
    return blocked(warp, Reason::copy, of_operation(operation), done == NEVER ? 0.0 : done);
}

bool Sm::issue_wgmma(Warp& warp, int operation) {
    const int group = warp.number / WARPGROUP_WARPS;
    if (warp.number % WARPGROUP_WARPS == 0) {  // the others do not stand still
        const double room = constant(Constant::wgmma_in_flight) - 0.5 - tensor_pending_;
        bool others_wait = false;
        for (size_t other = 0; other < stands_still_.size(); ++other) {
            others_wait |= stands_still_[other] && static_cast<int>(other) != group;
        }
        if (room <= 0.0 || (room <= 1.0 && others_wait && last_issuer_ == group)) {  // warpgroups in turn
            stands_still_[group] = true;
            return blocked(warp, Reason::mma_queue, mma_order_.empty() ? NO_CAUSE : of_operation(mma_order_.front()));
        }
        ++tensor_pending_;
        stands_still_[group] = false;
        last_issuer_ = group;
    }
    if (++joined_[operation] == WARPGROUP_WARPS) {
        mma_queues_[group].push_back(operation);
        issued_at_[operation] = now_;
        in_.operation_times[3 * operation] = now_;
        in_.issuer[operation] = warp.at;
    }
    return held(warp, constant(Constant::wgmma_issue_interval));
}

bool Sm::issue_tcgen05(Warp& warp, int operation, bool is_commit) {
    if (operation < 0) return true;
    if (!is_commit && tensor_pending_ >= constant(Constant::tcgen05_in_flight) - 0.5) {
        return blocked(warp, Reason::mma_queue, mma_order_.empty() ? NO_CAUSE : of_operation(mma_order_.front()));
    }
    if (!is_commit) ++tensor_pending_;
    mma_queues_[0].push_back(operation);
    issued_at_[operation] = now_;
    in_.operation_times[3 * operation] = now_;
    in_.issuer[operation] = warp.at;
    return held(warp, constant(Constant::tcgen05_issue_interval));
}

bool Sm::tensor_memory(Warp& warp, Partition& partition, const Uop& uop) {
    if (!past(partition.tmem_free)) return blocked(warp, Reason::pipe, NO_CAUSE, partition.tmem_free);
    const bool is_load = uop.kind == static_cast<int>(Kind::tmem_load);
    const double rate =
        constant(is_load ? Constant::tmem_load_registers_per_cycle : Constant::tmem_store_registers_per_cycle);
    double passes = uop.amount / rate;
    if (is_load && tensor_is_busy()) passes *= constant(Constant::tmem_load_slowdown_beside_mma);
    partition.tmem_free = std::max(partition.tmem_free, now_) + passes;
    if (is_load) {
        warp.tmem_loads_done = partition.tmem_free + constant(Constant::tmem_load_latency);
        write(warp, uop, warp.tmem_loads_done);
    } else {
        warp.tmem_stores_done = partition.tmem_free + constant(Constant::tmem_store_latency);
    }
    return true;
}

bool Sm::fence(Warp& warp, double cycles) {
    if (warp.stores_pending > 0) return blocked(warp, Reason::fence, warp.at);
    const double done = warp.stores_done + constant(Constant::shared_store_latency);
    if (!past(done)) return blocked(warp, Reason::fence, warp.at, done);
    return held(warp, cycles);
}

bool Sm::global_access(Warp& warp, const Uop& uop, int bytes) {
    global_free_ = std::max(global_free_, now_) + bytes / constant(Constant::global_bytes_per_cycle);
    if (uop.amount == 1) write(warp, uop, global_free_ + constant(Constant::global_load_latency));
    return true;
}

}  // namespace timing
