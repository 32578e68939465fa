// The tensor cores: one MMA after another; operands come through the shared-memory port, a little ahead.
#include <algorithm>

#include "model.hpp"

namespace timing {

void Sm::tensor_choose() {
    const auto depth = static_cast<size_t>(1.5 + constant(Constant::mma_operands_ahead));
    const int count = static_cast<int>(mma_queues_.size());
    while (mma_order_.size() < depth) {
        int chosen = -1;
        for (int i = 1; i <= count && chosen < 0; ++i) {  // warpgroups in turn
            const int queue = (last_queue_ + i) % count;
            if (!mma_queues_[queue].empty()) chosen = queue;
        }
        if (chosen < 0) return;
        last_queue_ = chosen;
        mma_order_.push_back(mma_queues_[chosen].front());
        mma_queues_[chosen].pop_front();
    }
}

int Sm::tensor_wants() const {
    for (const int operation : mma_order_) {
        if (fetch_left_[operation] > 0) return operation;
    }
    return -1;
}

void Sm::tensor_step() {
    tensor_choose();
    for (bool again = true; again;) {
        again = false;
        if (executing_ >= 0) {
            if (fetch_left_[executing_] > 0 || !past(execute_end_)) return;
            const double end = std::max(execute_end_, last_fetch_ > execute_end_ ? last_fetch_ : execute_end_);
            in_.operation_times[3 * executing_ + 2] = done_at_[executing_] = last_end_ = end;
            --tensor_pending_;
            executing_ = -1;
            mma_order_.pop_front();
            tensor_choose();
            progress_ = now_;
        }
        if (mma_order_.empty()) return;
        const int next = mma_order_.front();
        const Operation& of = in_.operations[next];
        if (of.engine == static_cast<int>(Engine::commit)) {
            const double end = std::max(last_end_, issued_at_[next]) + constant(Constant::tcgen05_tail);
            in_.operation_times[3 * next + 1] = last_end_;
            in_.operation_times[3 * next + 2] = end;
            if (of.token >= 0) contribute(of.token, end, of_operation(next));
            mma_order_.pop_front();
            tensor_choose();
            again = true;
            continue;
        }
        const Constant fill = in_.is_sm100
            ? (of.a_elsewhere ? Constant::tcgen05_fill_tmem : Constant::tcgen05_fill_shared)
            : (of.a_elsewhere ? Constant::wgmma_fill_register : Constant::wgmma_fill_shared);
        const double begin = std::max(last_end_, issued_at_[next] + constant(fill));
        if (!past(begin)) return;
        executing_ = next;
        in_.operation_times[3 * next + 1] = begin;
        execute_end_ = begin + of.multiply_adds / constant(Constant::mma_multiply_adds_per_cycle);
        again = past(execute_end_);
    }
}

}  // namespace timing
