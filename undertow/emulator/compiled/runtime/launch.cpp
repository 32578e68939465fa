// The C interface that Python calls through ctypes: programs, launches, outcomes.
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <mutex>
#include <thread>

#include "cluster.hpp"
#include "machine_ops.hpp"

using namespace undertow;

extern "C" {

// Mirrored by launch.py.
struct ProgramArguments {
    const Inst* code;
    const char* consts;
    const int32_t* lists;
    const int32_t* specials;  // pairs (number, row)
    int64_t num_code, consts_bytes, num_lists, num_specials;
    int64_t regs_bytes, predicate_bytes, local_bytes, num_instructions;
};

struct BufferArguments {
    uint64_t base, size;
    uint8_t* host;
    int64_t writable;
    const char* label;
};

struct MapArguments {
    uint64_t place;  // offset in the parameter block
    TensorMap map;
};

struct LaunchArguments {
    int32_t grid[3], block[3], cluster[3];
    int64_t dynamic_smem;
    uint64_t shared_base, shared_size;
    const uint8_t* parameters;
    const BufferArguments* buffers;
    const MapArguments* maps;
    const int32_t* cta_order;
    int64_t parameter_bytes, num_buffers, num_maps, num_ctas;
    int64_t completion, random_schedule, threads;
    uint64_t completion_seed, schedule_seed;
};

// One blocked group of a deadlock.
struct Blocked {
    int32_t cta, warp, code, kind;
    uint32_t mask;
    uint64_t subject;
    char detail[160];
};

struct Outcome {
    int64_t* executions;   // [num_instructions]
    int64_t* completions;  // [17] named barriers and the cluster barrier
    int64_t instructions;
    int32_t fault_kind, cta, warp, code;
    uint32_t mask;
    int32_t is_completion, num_blocked, num_notes;
    Blocked* blocked;  // [max_blocked]
    int32_t max_blocked, max_notes;
    int64_t* notes;    // [max_notes] pairs (instruction, value)
    char rule[48];
    char fact[1024];
};

int undertow_num_lane_handlers() { return num_lane_handlers; }

int undertow_machine_op(const char* name) {
    for (int i = 0; i < num_machine_forms; ++i) {
        if (std::strcmp(machine_forms[i].name, name) == 0) return kFirstMachineOp + i;
    }
    return -1;
}

void* undertow_program(const ProgramArguments* a) {
    auto* program = new Program;
    program->code.assign(a->code, a->code + a->num_code);
    for (Inst& inst : program->code) {
        if (inst.op == kLaneOp) inst.lane = lane_handlers[reinterpret_cast<uintptr_t>(inst.lane)];
    }
    program->consts.assign(a->consts, a->consts + a->consts_bytes);
    program->lists.assign(a->lists, a->lists + a->num_lists);
    for (int64_t i = 0; i < a->num_specials; ++i) {
        program->specials.emplace_back(a->specials[2 * i], a->specials[2 * i + 1]);
    }
    program->regs_bytes = a->regs_bytes;
    program->predicate_bytes = a->predicate_bytes;
    program->local_bytes = a->local_bytes;
    program->num_instructions = a->num_instructions;
    return program;
}

void undertow_free_program(void* program) { delete static_cast<Program*>(program); }

}  // extern "C"

namespace {

Launch make_launch(const Program& program, const LaunchArguments& a) {
    Launch launch;
    launch.program = &program;
    std::copy(a.grid, a.grid + 3, launch.grid);
    std::copy(a.block, a.block + 3, launch.block);
    std::copy(a.cluster, a.cluster + 3, launch.cluster);
    launch.dynamic_smem = a.dynamic_smem;
    launch.shared_base = a.shared_base;
    launch.shared_size = a.shared_size;
    launch.parameters.assign(a.parameters, a.parameters + a.parameter_bytes);
    for (int64_t i = 0; i < a.num_buffers; ++i) {
        const BufferArguments& b = a.buffers[i];
        launch.global.buffers.push_back(std::make_unique<Buffer>(b.base, b.size, b.host, b.writable != 0, b.label));
    }
    for (int64_t i = 0; i < a.num_maps; ++i) launch.tensor_maps[a.maps[i].place] = a.maps[i].map;
    launch.completion = Completion(a.completion);
    launch.completion_seed = a.completion_seed;
    launch.schedule_seed = a.schedule_seed;
    launch.is_random_schedule = a.random_schedule != 0;
    launch.num_threads = int(std::min<int64_t>(a.threads, a.num_ctas));
    launch.cta_order.assign(a.cta_order, a.cta_order + a.num_ctas);
    return launch;
}

std::string describe_wait(Cta& cta, const Warp& warp, const Wait& wait) {
    char text[160] = "";
    if (wait.kind == WaitKind::mbarrier) {
        const Mbarrier& cell = cta.shared.mbarrier(wait.subject);
        std::snprintf(text, sizeof(text),
                      "%s %lld; now in phase %lld, %lld of %lld arrivals pending, %lld bytes missing",
                      wait.by_parity ? "parity" : "phase", (long long)wait.argument, (long long)cell.phase,
                      (long long)cell.pending, (long long)cell.count, (long long)cell.tx);
    } else if (wait.kind == WaitKind::barrier) {
        const NamedBarrier& barrier = barrier_of(cta, int64_t(wait.subject));
        const std::string expected = barrier.expected ? std::to_string(barrier.expected) : "all";
        std::snprintf(text, sizeof(text), "%lld of %s threads arrived", (long long)barrier.arrived, expected.c_str());
    } else if (wait.kind == WaitKind::wgmma_group) {
        const Warpgroup& group = cta.warpgroups[size_t(warp.number / kGroupWarps)];
        std::snprintf(text, sizeof(text), "%lld groups of warp %d open, %llu allowed",
                      (long long)group.open_count(warp.number % kGroupWarps), warp.number,
                      (unsigned long long)wait.subject);
        if (group.gathering.empty()) return text;
        return text + ("; " + std::to_string(__builtin_popcount(group.gathering.front().warps)) +
                       " of 4 warps have issued the next MMA");
    } else if (wait.kind == WaitKind::tmem_alloc) {
        return "live allocations: " + cta.tmem.describe();
    } else if (!wait.others.empty()) {
        const auto kind = wait.kind == WaitKind::bulk_group ? AsyncEngines::bulk : AsyncEngines::cp_async;
        const int thread = int(wait.others[0].first);
        std::snprintf(text, sizeof(text), "%lld groups of thread %d open, %lld allowed",
                      (long long)cta.engines.open_count(kind, thread), thread, (long long)wait.argument);
    }
    return text;
}

constexpr size_t kMaxResident = 148;  // CTAs that may spin side by side: one per multiprocessor of a B200

// Runs the CTAs of a launch and gathers what happened: on several threads, or on one with CTAs that spin side by side.
class Run {
public:
    Run(Launch& launch, Outcome& outcome) : launch_(launch), outcome_(outcome), commits_(launch.cta_order.size()) {}

    void go() {
        if (launch_.num_threads <= 1) return work_alone();
        launch_.commits = &commits_;
        std::vector<std::thread> threads;
        for (int i = 1; i < launch_.num_threads; ++i) threads.emplace_back([this] { work_beside_others(); });
        work_beside_others();
        for (std::thread& thread : threads) thread.join();
    }

private:
    size_t cluster_size() const {
        return size_t(launch_.cluster[0]) * size_t(launch_.cluster[1]) * size_t(launch_.cluster[2]);
    }

    std::unique_ptr<Cluster> new_cluster() {
        auto cluster = std::make_unique<Cluster>();
        for (size_t i = 0; i < cluster_size(); ++i) cluster->ctas.push_back(std::make_unique<Cta>(launch_));
        return cluster;
    }

    // Only clusters of one CTA run beside others: reductions are put off until earlier CTAs have finished.
    void work_beside_others() {
        const auto cluster = new_cluster();
        Cta& cta = *cluster->ctas.front();
        while (!is_stopped_.load()) {
            const size_t next = next_.fetch_add(1);
            if (next >= launch_.cta_order.size()) break;
            try {
                cluster->reset(launch_.cta_order.data() + next, int(next));
                if (!run_cluster(*cluster)) fail_spinning();
                tally_barriers(cta);
                commits_.finish(next, std::move(cta.reductions));
            } catch (const Fault& fault) {
                stop(fault, cta, {&cta});
            } catch (const std::exception& error) {
                stop(Fault{FaultKind::launch, error.what(), ""}, cta, {&cta});
            }
        }
        add(cta);
    }

    // A cluster that only polls gives way: the next one becomes resident beside it, so that semaphores between CTAs
    // work. `cta_order` has the CTAs of a cluster one after the other.
    void work_alone() {
        const size_t size = cluster_size();
        std::vector<std::unique_ptr<Cluster>> resident, idle;
        int fruitless = 0;
        const auto begin_next = [&] {
            if (idle.empty()) idle.push_back(new_cluster());
            resident.push_back(std::move(idle.back()));
            idle.pop_back();
            const size_t next = next_.fetch_add(size);
            resident.back()->reset(launch_.cta_order.data() + next, int(next));
        };
        const auto total_progress = [&] {
            int64_t sum = 0;
            for (const auto& cluster : resident) sum += cluster->progress();
            return sum;
        };
        while (!is_stopped_.load() && (next_.load() < launch_.cta_order.size() || !resident.empty())) {
            if (resident.empty()) begin_next();
            const int64_t before = total_progress();
            bool any_finished = false;
            for (size_t i = 0; i < resident.size() && !is_stopped_.load();) {
                Cluster& cluster = *resident[i];
                try {
                    if (!run_cluster(cluster)) {
                        ++i;
                        continue;
                    }
                } catch (const Fault& fault) {
                    stop(fault, *cluster.current, members(cluster));
                    break;
                }
                for (const auto& cta : cluster.ctas) tally_barriers(*cta);
                any_finished = true;
                idle.push_back(std::move(resident[i]));
                resident.erase(resident.begin() + long(i));
            }
            fruitless = !any_finished && before == total_progress() ? fruitless + 1 : 0;
            if (resident.empty() || is_stopped_.load()) continue;
            if (next_.load() < launch_.cta_order.size() && resident.size() * size < kMaxResident) {
                begin_next();
            } else if (fruitless > 3) {
                report_spinning(resident);
            }
        }
        for (const auto* clusters : {&idle, &resident}) {
            for (const auto& cluster : *clusters) {
                for (const auto& cta : cluster->ctas) add(*cta);
            }
        }
    }

    static std::vector<Cta*> members(const Cluster& cluster) {
        std::vector<Cta*> all;
        for (const auto& cta : cluster.ctas) all.push_back(cta.get());
        return all;
    }

    [[noreturn]] static void fail_spinning() {
        fail(FaultKind::deadlock, "deadlock: every resident CTA spins and nothing is in flight");
    }

    void report_spinning(const std::vector<std::unique_ptr<Cluster>>& resident) {
        std::vector<Cta*> all;
        for (const auto& cluster : resident) {
            for (Cta* cta : members(*cluster)) all.push_back(cta);
        }
        try {
            fail_spinning();
        } catch (const Fault& fault) {
            stop(fault, *all[0], all);
        }
    }

    void tally_barriers(const Cta& cta) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [id, barrier] : cta.barriers) outcome_.completions[id] += barrier.generation;
    }

    void add(const Cta& cta) {
        std::lock_guard<std::mutex> lock(mutex_);
        outcome_.instructions += cta.instructions;
        for (size_t i = 0; i < size_t(launch_.program->num_instructions); ++i) {
            outcome_.executions[i] += cta.executions[i];
        }
        for (const auto& [instruction, value] : cta.notes) {
            if (outcome_.num_notes == outcome_.max_notes) break;
            outcome_.notes[2 * outcome_.num_notes] = instruction;
            outcome_.notes[2 * outcome_.num_notes + 1] = value;
            outcome_.num_notes += 1;
        }
    }

    // Keeps the fault of the CTA that comes first in the order.
    void stop(const Fault& fault, const Cta& cta, const std::vector<Cta*>& reported) {
        is_stopped_.store(true);
        if (launch_.commits) commits_.stop();
        std::lock_guard<std::mutex> lock(mutex_);
        if (fault.kind == FaultKind::none || cta.place >= first_fault_) return;
        first_fault_ = cta.place;
        outcome_.fault_kind = int(fault.kind);
        outcome_.cta = cta.at.cta;
        outcome_.warp = cta.at.warp;
        outcome_.code = cta.at.code;
        outcome_.mask = cta.at.mask;
        outcome_.is_completion = cta.at.is_completion;
        std::snprintf(outcome_.rule, sizeof(outcome_.rule), "%s", fault.rule.c_str());
        std::snprintf(outcome_.fact, sizeof(outcome_.fact), "%s", fault.fact.c_str());
        outcome_.num_blocked = 0;
        if (fault.kind != FaultKind::deadlock) return;
        for (Cta* blocked : reported) report_blocked(*blocked);
    }

    void report_blocked(Cta& cta) {
        for (const Warp& warp : cta.warps) {
            for (const Group& group : warp.groups) {
                if (outcome_.num_blocked == outcome_.max_blocked) return;
                Blocked& blocked = outcome_.blocked[outcome_.num_blocked++];
                blocked.cta = cta.number;
                blocked.warp = warp.number;
                blocked.code = group.pc;
                blocked.kind = int(group.wait.kind);
                blocked.mask = group.mask;
                blocked.subject = group.wait.subject;
                std::snprintf(blocked.detail, sizeof(blocked.detail), "%s", describe_wait(cta, warp, group.wait).c_str());
            }
        }
    }

    Launch& launch_;
    Outcome& outcome_;
    CommitOrder commits_;
    std::atomic<size_t> next_{0};
    std::atomic<bool> is_stopped_{false};
    std::mutex mutex_;
    int first_fault_ = INT_MAX;
};

}  // namespace

extern "C" void undertow_run(const void* program, const LaunchArguments* arguments, Outcome* outcome) {
    Launch launch = make_launch(*static_cast<const Program*>(program), *arguments);
    Run(launch, *outcome).go();
}
