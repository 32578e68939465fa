// CTAs on several threads, results as if one ran after the other.
//
// A bulk reduction into global memory is put off until all CTAs that come earlier have finished, so the order of
// floating-point additions is the order of CTAs. Any other access to a buffer with such a reduction waits until its
// CTA is the earliest one left; then what it has put off itself is committed and it sees what it would have seen.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "atomics.hpp"
#include "memory.hpp"

namespace undertow {

struct Reduction {
    Buffer* buffer;
    uint64_t offset;
    AtomicOp op;
    AtomicType type;
    std::vector<uint8_t> data;

    void commit() const;
};

// Combines `num_bytes` of elements into memory, in ascending order.
void reduce_bytes(uint8_t* memory, const uint8_t* data, uint64_t num_bytes, AtomicOp op, AtomicType type);

uint64_t atomic_type_bytes(AtomicType type);

class CommitOrder {
public:
    explicit CommitOrder(size_t num_ctas) : finished_(num_ctas), is_finished_(num_ctas, false) {}

    bool is_turn(size_t place);
    // Blocks the thread until every earlier CTA has committed. False: the launch has been stopped.
    bool wait_for_turn(size_t place);
    void finish(size_t place, std::vector<Reduction> reductions);
    void stop();

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    size_t turn_ = 0;
    bool is_stopped_ = false;
    std::vector<std::vector<Reduction>> finished_;
    std::vector<bool> is_finished_;
};

}  // namespace undertow
