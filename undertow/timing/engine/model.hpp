// One SM that replays the recorded instructions of one CTA, cycle by cycle. Times are cycles; a fraction is kept where
// an interval has one, and rounded to the nearest cycle when something asks whether it has come.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "names.hpp"

namespace timing {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int PARTITIONS = 4;
constexpr int WARPGROUP_WARPS = 4;
constexpr int NO_CAUSE = -1;

// Why a warp did not issue in the cycle before it did.
enum class Reason : int8_t {
    none, slot, data, pipe, queue, mma_queue, mbarrier, barrier, mma, copy, tmem, fence, branch, hold, stall
};

struct Uop {
    int32_t kind, unit, issues, amount, read_begin, read_end, write_begin, write_end;
};

struct Operation {
    int32_t engine, warp, multiply_adds, bytes, a_elsewhere, token, gemm;
};

// What Python hands over; see `run.py`. `cause` of an entry or token: an entry of a stream, or -2 - operation.
struct Input {
    int32_t num_warps, num_registers, num_uops, num_tokens, num_operations, is_sm100;
    const Uop* uops;
    const int32_t* pool;
    const int32_t* begins;
    const int32_t* uop;
    const int32_t* argument;
    const int32_t* tokens;
    const Operation* operations;
    const double* constants;
    uint64_t seed;
    double* issued;
    int8_t* reason;
    int32_t* cause;
    double* operation_times;  // per operation: issued, begun, ended
    double* token_at;
    int32_t* token_cause;
    int32_t* issuer;  // entry of the stream that issued an operation
    double* grants;  // of the shared-memory port: MMA operands, loads, stores, TMA writes, bulk reads
};

inline int32_t of_operation(int operation) { return -2 - operation; }

class Random {  // xorshift64*: the same seed, the same run
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567ull) {}
    double uniform() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<double>((state_ * 0x2545F4914F6CDD1Dull) >> 11) * 0x1.0p-53;
    }

  private:
    uint64_t state_;
};

struct Token {
    int left = 0;
    int released = 0;
    double at = 0.0;
    int32_t cause = NO_CAUSE;
};

struct Warp {
    int number = 0, at = 0, end = 0;
    double ready = 0.0;
    double since = -1.0;   // when the present wait began
    double resume = NEVER;  // when it ends, once that is known
    Reason blame = Reason::none;
    int32_t cause = NO_CAUSE;
    int stores_pending = 0;
    double stores_done = 0.0;
    double tmem_loads_done = 0.0, tmem_stores_done = 0.0;
    int slots_lost = 0;  // cycles in which it could have issued, had another warp not
    std::vector<double> registers;
    std::vector<int32_t> writer;
};

struct Request {  // a load, store or arrival on its way to the shared-memory port
    int warp, entry, passes;
    int32_t kind;
};

struct Partition {
    std::vector<int> warps;
    int last = -1;
    double slot_free = 0.0;
    double units[NUM_UNITS] = {};
    double tmem_free = 0.0;
    double next_pass = 0.0;
    std::deque<Request> requests;
};

class Sm {
  public:
    explicit Sm(const Input& input);
    double run();  // cycles, or -1 where nothing can go on

  private:
    double constant(Constant name) const { return in_.constants[static_cast<int>(name)]; }
    bool past(double time) const { return time - now_ <= 0.5; }

    // warps.cpp
    void issue_slots();
    bool try_issue(Warp& warp, Partition& partition);
    bool reads_ready(Warp& warp, const Uop& uop);
    bool dispatch(Warp& warp, Partition& partition, const Uop& uop, int argument);
    bool arithmetic(Warp& warp, Partition& partition, const Uop& uop);
    bool blocked(Warp& warp, Reason reason, int32_t cause, double until = 0.0);
    bool held(Warp& warp, double cycles, Reason reason = Reason::hold);
    void write(Warp& warp, const Uop& uop, double time);
    // waits.cpp
    bool wait_token(Warp& warp, const Uop& uop, int token, bool is_barrier);
    bool wait_mma(Warp& warp, int operation);
    bool wait_copy(Warp& warp, int operation, bool reads_only);
    bool issue_wgmma(Warp& warp, int operation);
    bool issue_tcgen05(Warp& warp, int operation, bool is_commit);
    bool tensor_memory(Warp& warp, Partition& partition, const Uop& uop);
    bool fence(Warp& warp, double cycles);
    bool global_access(Warp& warp, const Uop& uop, int bytes);
    void contribute(int token, double time, int32_t cause);
    // tensor.cpp
    void tensor_step();
    void tensor_choose();
    int tensor_wants() const;
    bool tensor_is_busy() const { return executing_ >= 0; }
    // port.cpp
    void port_step();
    void arrivals();
    void copies_step();
    bool lsu_grant(bool loads_may);
    void load_pass();
    bool read_pass(bool beside_mma);
    void fetch(int operation);
    void granted(Partition& partition);
    void issue_copy(Warp& warp, int operation);

    Input in_;
    double now_ = 0.0;
    double progress_ = 0.0;
    Random random_;
    std::vector<Warp> warps_;
    std::vector<Partition> partitions_;
    std::vector<Token> tokens_;
    int running_ = 0;
    double mbarrier_free_ = 0.0, global_free_ = 0.0;

    // tensor cores: queues by warpgroup (SM90) or one (SM100), and what was taken from them in order
    std::vector<std::deque<int>> mma_queues_;
    std::deque<int> mma_order_;
    std::vector<int> fetch_left_, joined_;
    std::vector<bool> stands_still_;  // a warpgroup's first warp, at its next MMA
    int last_issuer_ = -1;
    std::vector<double> done_at_, read_at_, issued_at_;
    int executing_ = -1, last_queue_ = 0, tensor_pending_ = 0;
    double execute_end_ = 0.0, last_end_ = 0.0, last_fetch_ = -1e9;

    // shared-memory port
    double mma_run_ = 0.0, load_credit_ = 1.0;
    double write_turn_ = 0.0, read_credit_ = 0.0;
    bool store_is_held_ = false;  // in this cycle, by what a copy writes
    int next_partition_ = 0;

    // copies: loads write shared memory, reductions and stores read it
    std::deque<int> loads_, reads_;
    int load_passes_ = -1, read_passes_ = -1;
    double load_next_ = 0.0, load_begin_ = -1e9, load_bytes_ = 0.0, read_next_ = 0.0, read_free_ = 0.0;
};

}  // namespace timing
