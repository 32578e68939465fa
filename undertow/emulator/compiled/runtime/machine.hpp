// Warps, CTAs and the launch: the state that the interpreter moves from instruction to instruction.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "commit.hpp"
#include "memory.hpp"
#include "program.hpp"
#include "warpgroup.hpp"

namespace undertow {

// Windows of the generic address space, as in semantics/data_movement.py; everything else is global memory.
constexpr uint64_t kSharedWindow = 0x7F4000000000, kParamWindow = 0x7F5000000000, kLocalWindow = 0x7F6000000000;
constexpr uint64_t kWindowBytes = uint64_t(1) << 32;

// A small generator of reproducible choices (splitmix64).
class Random {
public:
    void seed(uint64_t value) { state_ = value; }

    uint64_t operator()() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

private:
    uint64_t state_ = 0;
};

enum class WaitKind : int { none = 0, mbarrier, barrier, bulk_group, cp_async_group, tmem_alloc, wgmma_group };

// Why lanes cannot go on. When `is_ready` says so, the instruction runs once more.
struct Wait {
    WaitKind kind = WaitKind::none;
    uint64_t subject = 0;     // address, id or count, for the label
    int64_t argument = 0;     // parity, phase, generation or limit of open groups
    bool by_parity = false;
    // More (subject, argument), where lanes differ: one of these mbarriers is enough, all of these threads are needed.
    std::vector<std::pair<uint64_t, int64_t>> others;
    bool can_expire = false;  // try_wait may come back false when nothing else can happen ...
    bool expired = false;     // ... which this tells it
};

// Lanes of a warp that sit at the same place.
struct Group {
    int pc;
    uint32_t mask;
    Wait wait;
};

struct Warp {
    int number;
    uint32_t members;
    char* regs;
    std::vector<Group> groups;  // ascending by pc; lanes that exited are gone
    std::map<int, std::pair<int, int64_t>> barrier_tokens;  // instruction -> (barrier, generation before arrival)

    uint32_t live_mask() const;
    void merge_groups();
};

struct NamedBarrier {
    int64_t arrived = 0, generation = 0, expected = 0, reduction = 0, result = 0;
};

enum class Engine : int { tensor, wgmma, tensor_load, bulk_load, bulk_store, bulk_reduce, cp_async };

// Where something happens: CTA, warp, position in the code, lanes. `is_completion`: it was issued there earlier.
struct Place {
    int cta = -1, warp = -1, code = -1;
    uint32_t mask = 0;
    bool is_completion = false;
};

// One operation in flight; `run` has its whole effect, at completion. `after` must complete first.
struct AsyncOperation {
    Engine engine;
    int thread;
    std::function<void()> run;
    std::vector<std::shared_ptr<AsyncOperation>> after;
    int64_t number = 0;
    bool done = false;
    Place issued_at;
};
using Operation = std::shared_ptr<AsyncOperation>;

enum class Completion : int { eager = 0, late = 1, seeded = 2 };

// The engines of one CTA: a first-in-first-out tensor pipe, and copies that complete in any order.
class AsyncEngines {
public:
    enum GroupKind : int { bulk = 0, cp_async = 1 };

    // `place` is where the machine is now: copied at issue, restored when a completion fails.
    AsyncEngines(Completion mode, Place& place) : mode_(mode), place_(place) {}

    void reset(uint64_t seed);
    bool is_eager() const { return mode_ == Completion::eager; }
    bool pending() const { return !tensor_pipe_.empty() || !copies_.empty(); }
    // Takes an operation; under eager completion it happens now and null is returned.
    Operation issue(Engine engine, int thread, std::function<void()> run, std::vector<Operation> after = {});
    void step();
    void maybe_step();

    void join_group(GroupKind kind, const Operation& operation);
    void commit_group(GroupKind kind, int thread);
    int64_t open_count(GroupKind kind, int thread);
    bool has_open_group(GroupKind kind, int thread) const { return open_groups_.count({kind, thread}) != 0; }
    std::vector<Operation> unfinished(GroupKind kind, int thread);

private:
    void complete(const Operation& operation);

    Completion mode_;
    Place& place_;
    Random random_;
    int64_t num_issued_ = 0;
    std::vector<Operation> tensor_pipe_, copies_;
    std::map<std::pair<int, int>, std::vector<std::vector<Operation>>> groups_;
    std::map<std::pair<int, int>, std::vector<Operation>> open_groups_;
};

// A tensor map parameter: what its 128 bytes mean.
struct TensorMap {
    uint64_t address;  // device address of element 0
    int64_t dims[5];
    int64_t strides[5];  // bytes, of every dimension
    int32_t box[5];
    int32_t rank, element_bytes, swizzle;
    int32_t type;      // AtomicType of the elements, or -1 for types that no reduction knows
    int32_t fill_nan;  // 1: elements outside are NaN, else zero
};

struct Program {
    std::vector<Inst> code;
    std::vector<char> consts;
    std::vector<int32_t> lists;  // operand lists: a count, then row offsets
    int64_t regs_bytes;        // of a warp; begins with `predicate_bytes` of predicate rows, which start as false
    int64_t predicate_bytes;
    int64_t local_bytes, num_instructions;
    std::vector<std::pair<int32_t, int32_t>> specials;  // (number in specials.hpp, row) of those in use
};


struct Launch {
    const Program* program;
    int32_t grid[3], block[3], cluster[3];
    int64_t dynamic_smem;
    uint64_t shared_base, shared_size;
    std::vector<uint8_t> parameters;
    std::map<uint64_t, TensorMap> tensor_maps;  // by address in the parameter block's window
    GlobalMemory global;
    Completion completion;
    uint64_t completion_seed, schedule_seed;
    bool is_random_schedule;
    int num_threads;
    std::vector<int32_t> cta_order;
    CommitOrder* commits = nullptr;  // set while CTAs run in parallel
};

struct Cluster;

// A thread block. Reused for one CTA of the grid after another.
class Cta {
public:
    explicit Cta(Launch& launch);

    void reset(int number, int place_in_order);
    bool finished() const;
    int64_t live_warps() const;
    void note(int32_t instruction, int64_t value);

    // The buffer of an access at `low`, preferring one that reaches to `high_end`.
    Buffer& global_buffer(uint64_t low, uint64_t high_end, uint64_t size);
    // To be called before any access but a bulk reduction; cheap unless reductions into the buffer are put off.
    void before_access(Buffer& buffer) {
        if (__builtin_expect(buffer.is_reduced.load(std::memory_order_relaxed), 0)) wait_for_turn();
    }
    // Reduces now, or after the CTAs that come earlier.
    void reduce_global(Buffer& buffer, uint64_t offset, const uint8_t* data, uint64_t num_bytes, int op, int type);

    Launch& launch;
    int num_threads, number = 0, place = 0;  // `place` counts in the order of CTAs
    Cluster* cluster = nullptr;
    int rank = 0;  // in the cluster
    Place at;
    int32_t position[3] = {0, 0, 0};
    std::vector<Warp> warps;
    SharedMemory shared;
    TensorMemory tmem;
    AsyncEngines engines;
    std::map<int64_t, NamedBarrier> barriers;
    std::vector<Warpgroup> warpgroups;
    std::vector<Operation> last_mma;  // of each warpgroup: the next one comes after it
    std::vector<uint8_t> local;
    std::vector<int64_t> executions;          // per PTX instruction, over all CTAs run here
    std::vector<Reduction> reductions;        // put off until all earlier CTAs have committed
    std::vector<std::pair<int32_t, int64_t>> notes;  // (instruction, value): parities that the ISA forbids
    int64_t instructions = 0, progress = 0, polls = 0;
    Random random;

private:
    void wait_for_turn();
    bool take_turn();  // whether every earlier CTA has committed; if so, commits what this one has put off

    std::unique_ptr<char, void (*)(void*)> registers_;
    Buffer* last_buffer_ = nullptr;
    bool has_turn_ = false;
};

// Everything a machine form needs. `mask`: lanes that execute; `group->mask`: lanes that are there.
struct Context {
    Cta& cta;
    Warp& warp;
    Group& group;
    const Inst& inst;
    uint32_t mask;
    const Program& program;

    template <class T>
    const T* row(int32_t ref) const {
        return source<T>(warp.regs, program.consts.data(), ref);
    }
    template <class T>
    T* out(int32_t ref) const {
        return target<T>(warp.regs, ref);
    }
    uint32_t predicate(int32_t ref) const { return *row<uint32_t>(ref); }
    const int32_t* list(int32_t start) const { return program.lists.data() + start; }
    int lane() const { return __builtin_ctz(mask); }
    int thread(int lane) const { return warp.number * kLanes + lane; }
};

template <class Body>
inline void each_lane(uint32_t mask, Body&& body) {
    for (uint32_t left = mask; left; left &= left - 1) body(__builtin_ctz(left));
}

// yield: the instruction is done, and other warps should go before the next one.
enum class Step { next, blocked, yield };
using MachineHandler = Step (*)(Context&);

struct MachineForm {
    const char* name;
    MachineHandler handler;
};
extern const MachineForm machine_forms[];
extern const int num_machine_forms;
extern const LaneHandler lane_handlers[];
extern const int num_lane_handlers;

// `may_overtake`: lanes further on may go before those that wait furthest behind, so that lanes of one warp can wait
// for each other; done only when nothing else can run.
void execute_warp(Cta& cta, Warp& warp, int64_t budget, bool may_overtake = false);
bool is_ready(Cta& cta, Warp& warp, const Wait& wait);
void complete_barrier(Cta& cta, NamedBarrier& barrier);
void check_members(const Context& c, uint32_t members);
void check_whole_warp(const Context& c);

}  // namespace undertow
