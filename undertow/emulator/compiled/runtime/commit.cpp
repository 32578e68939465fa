#include "commit.hpp"

#include <cstring>
#include <utility>

namespace undertow {

uint64_t atomic_type_bytes(AtomicType type) {
    switch (type) {
        case AtomicType::u16:
        case AtomicType::f16:
        case AtomicType::bf16:
            return 2;
        case AtomicType::u64:
        case AtomicType::s64:
        case AtomicType::f64:
            return 8;
        default:
            return 4;
    }
}

namespace {

template <class Element>
void reduce_elements(uint8_t* memory, const uint8_t* data, uint64_t num_bytes, AtomicOp op, AtomicType type) {
    for (uint64_t i = 0; i < num_bytes; i += sizeof(Element)) {
        Element old, fresh;
        std::memcpy(&old, memory + i, sizeof(Element));
        std::memcpy(&fresh, data + i, sizeof(Element));
        Element result = Element(combine(op, type, old, fresh));
        std::memcpy(memory + i, &result, sizeof(Element));
    }
}

}  // namespace

void reduce_bytes(uint8_t* memory, const uint8_t* data, uint64_t num_bytes, AtomicOp op, AtomicType type) {
    if (op == AtomicOp::add && type == AtomicType::f32) {  // every dQ accumulator, in a form that vectorises
        for (uint64_t i = 0; i < num_bytes; i += 4) {
            float old, fresh;
            std::memcpy(&old, memory + i, 4);
            std::memcpy(&fresh, data + i, 4);
            old += fresh;
            std::memcpy(memory + i, &old, 4);
        }
        return;
    }
    switch (atomic_type_bytes(type)) {
        case 2:
            return reduce_elements<uint16_t>(memory, data, num_bytes, op, type);
        case 4:
            return reduce_elements<uint32_t>(memory, data, num_bytes, op, type);
        default:
            return reduce_elements<uint64_t>(memory, data, num_bytes, op, type);
    }
}

void Reduction::commit() const { reduce_bytes(buffer->host + offset, data.data(), data.size(), op, type); }

bool CommitOrder::is_turn(size_t place) {
    std::lock_guard<std::mutex> lock(mutex_);
    return turn_ == place;
}

bool CommitOrder::wait_for_turn(size_t place) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return turn_ == place || is_stopped_; });
    return !is_stopped_;
}

void CommitOrder::finish(size_t place, std::vector<Reduction> reductions) {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_[place] = std::move(reductions);
    is_finished_[place] = true;
    while (turn_ < finished_.size() && is_finished_[turn_]) {
        for (const Reduction& reduction : finished_[turn_]) reduction.commit();
        finished_[turn_] = {};
        ++turn_;
    }
    changed_.notify_all();
}

void CommitOrder::stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
}

}  // namespace undertow
