// The shared-memory port, one pass per cycle, and the copies that use it.
#include <algorithm>

#include "model.hpp"

namespace timing {

void Sm::issue_copy(Warp& warp, int operation) {
    const auto engine = static_cast<Engine>(in_.operations[operation].engine);
    issued_at_[operation] = now_;
    in_.operation_times[3 * operation] = now_;
    in_.issuer[operation] = warp.at;
    const bool reads_shared = engine == Engine::bulk_reduce || engine == Engine::bulk_store;
    (reads_shared ? reads_ : loads_).push_back(operation);
}

void Sm::copies_step() {
    const double width = constant(Constant::shared_port_bytes_per_cycle);
    if (load_passes_ < 0 && !loads_.empty()) {
        const int next = loads_.front();
        const double begin = std::max(issued_at_[next] + constant(Constant::tma_load_latency),
                                      load_begin_ + load_bytes_ / constant(Constant::tma_load_bytes_per_cycle));
        if (past(begin)) {
            load_begin_ = load_next_ = begin;
            load_bytes_ = in_.operations[next].bytes;
            load_passes_ = std::max(1, static_cast<int>(load_bytes_ / width + 0.999));
            in_.operation_times[3 * next + 1] = begin;
        }
    }
    if (read_passes_ < 0 && !reads_.empty()) {
        const int next = reads_.front();
        const bool adds = in_.operations[next].engine == static_cast<int>(Engine::bulk_reduce);
        const double latency = constant(adds ? Constant::bulk_reduce_latency : Constant::bulk_store_latency);
        const double begin = std::max(read_free_, issued_at_[next] + latency);
        if (past(begin)) {
            read_next_ = begin;
            read_passes_ = std::max(1, static_cast<int>(in_.operations[next].bytes / width + 0.999));
            in_.operation_times[3 * next + 1] = begin;
        }
    }
}

// TMA loads write shared memory beside whoever reads it; stores, which write as well, wait for them.
void Sm::load_pass() {
    store_is_held_ = false;
    if (load_passes_ <= 0 || !past(load_next_)) return;
    const double width = constant(Constant::shared_port_bytes_per_cycle);
    load_next_ = std::max(load_next_, now_ - 1.0) + width / constant(Constant::tma_load_burst_bytes_per_cycle);
    write_turn_ += constant(Constant::store_passes_per_copied_pass);
    if (write_turn_ >= 1.0) {
        write_turn_ -= 1.0;
        store_is_held_ = true;
    }
    in_.grants[3] += 1.0;
    progress_ = now_;
    if (--load_passes_ > 0) return;
    const int done = loads_.front();
    loads_.pop_front();
    load_passes_ = -1;
    done_at_[done] = in_.operation_times[3 * done + 2] = now_;
    if (in_.operations[done].token >= 0) contribute(in_.operations[done].token, now_, of_operation(done));
}

// Bulk reductions and stores read shared memory: before loads, after operands of MMAs, of whose pauses they get a share.
bool Sm::read_pass(bool beside_mma) {
    if (read_passes_ <= 0 || !past(read_next_)) return false;
    if (beside_mma) {
        read_credit_ += constant(Constant::bulk_read_share_beside_mma);
        if (read_credit_ < 1.0) return false;
        read_credit_ -= 1.0;
    }
    const int current = reads_.front();
    const bool adds = in_.operations[current].engine == static_cast<int>(Engine::bulk_reduce);
    const double rate = constant(adds ? Constant::bulk_reduce_bytes_per_cycle : Constant::bulk_store_bytes_per_cycle);
    read_next_ += constant(Constant::shared_port_bytes_per_cycle) / rate;
    in_.grants[4] += 1.0;
    progress_ = now_;
    if (--read_passes_ == 0) {
        reads_.pop_front();
        read_passes_ = -1;
        read_free_ = std::max(read_next_, now_);
        read_at_[current] = done_at_[current] = in_.operation_times[3 * current + 2] = read_free_;
    }
    return true;
}

void Sm::arrivals() {
    for (Partition& partition : partitions_) {
        while (!partition.requests.empty() && partition.requests.front().passes == 0) {
            const Request request = partition.requests.front();
            partition.requests.pop_front();
            mbarrier_free_ = std::max(mbarrier_free_, now_) + constant(Constant::mbarrier_unit_interval);
            const double done = mbarrier_free_ - constant(Constant::mbarrier_unit_interval)
                + constant(Constant::mbarrier_arrive_latency);
            contribute(in_.argument[request.entry], done, request.entry);
            progress_ = now_;
        }
    }
}

// A load or a store in turn; where a store's write waits for a copy's, the port waits with it.
bool Sm::lsu_grant(bool loads_may) {
    for (int i = 0; i < PARTITIONS; ++i) {
        Partition& partition = partitions_[(next_partition_ + i) % PARTITIONS];
        if (partition.requests.empty() || !past(partition.next_pass)) continue;
        const bool is_load = partition.requests.front().kind == static_cast<int>(Kind::load);
        if (is_load && !loads_may) continue;
        if (!is_load && store_is_held_) return true;
        next_partition_ = (next_partition_ + i + 1) % PARTITIONS;
        mma_run_ = std::max(0.0, mma_run_ - constant(Constant::mma_grants_per_other));
        granted(partition);
        return true;
    }
    return false;
}

void Sm::granted(Partition& partition) {
    Request& request = partition.requests.front();
    const bool is_load = request.kind == static_cast<int>(Kind::load);
    in_.grants[is_load ? 1 : 2] += 1.0;
    if (is_load) load_credit_ -= 1.0;
    else if (executing_ >= 0 && in_.operations[executing_].a_elsewhere && !in_.is_sm100) {
        execute_end_ += constant(Constant::mma_delay_per_store_pass);
    }
    partition.next_pass = std::max(partition.next_pass, now_ - 1.0) + constant(Constant::lsu_pass_interval);
    progress_ = now_;
    if (--request.passes > 0) return;
    Warp& warp = warps_[request.warp];
    if (is_load) {
        const Uop& uop = in_.uops[in_.uop[request.entry]];
        for (int j = uop.write_begin; j < uop.write_end; ++j) {
            const int name = in_.pool[j];
            if (warp.writer[name] == request.entry) warp.registers[name] = now_ + constant(Constant::shared_load_latency);
        }
    } else {
        --warp.stores_pending;
        warp.stores_done = now_;
    }
    partition.requests.pop_front();
}

void Sm::port_step() {
    arrivals();
    load_pass();
    load_credit_ = std::min(1.0, load_credit_ + constant(Constant::load_share_beside_mma));
    const int wants = tensor_wants();
    const bool is_shared = constant(Constant::mma_shares_port) > 0.5, beside = is_shared && executing_ >= 0;
    const bool others_first = is_shared && mma_run_ >= constant(Constant::mma_grants_per_other);
    if (wants >= 0 && !others_first) {
        fetch(wants);
        mma_run_ = std::min(mma_run_ + 1.0, constant(Constant::mma_grants_per_other) + 1.0);
        if (is_shared) return;
    }
    const bool loads_may = !beside || load_credit_ >= 1.0;
    if (!others_first || wants < 0) {
        lsu_grant(!read_pass(beside) && loads_may);
    } else if (const double loads = in_.grants[1]; !lsu_grant(loads_may)) {
        fetch(wants);
    } else if (in_.grants[1] == loads) {
        read_pass(beside);  // beside a store
    }
}

void Sm::fetch(int operation) {
    --fetch_left_[operation];
    last_fetch_ = now_;
    in_.grants[0] += 1.0;
}

}  // namespace timing
