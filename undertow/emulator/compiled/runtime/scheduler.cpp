// Which warp runs next, when engines complete their work, and what to say when nothing can go on.
#include <algorithm>
#include <iterator>
#include <utility>

#include "cluster.hpp"

namespace undertow {

void AsyncEngines::reset(uint64_t seed) {
    random_.seed(seed);
    num_issued_ = 0;
    tensor_pipe_.clear();
    copies_.clear();
    groups_.clear();
    open_groups_.clear();
}

Operation AsyncEngines::issue(Engine engine, int thread, std::function<void()> run, std::vector<Operation> after) {
    if (is_eager()) {
        run();
        return nullptr;
    }
    auto operation = std::make_shared<AsyncOperation>();
    operation->engine = engine;
    operation->thread = thread;
    operation->run = std::move(run);
    operation->after = std::move(after);
    operation->number = num_issued_++;
    operation->issued_at = place_;
    (engine == Engine::tensor ? tensor_pipe_ : copies_).push_back(operation);
    return operation;
}

void AsyncEngines::complete(const Operation& operation) {
    try {
        operation->run();
    } catch (const Fault&) {
        place_ = operation->issued_at;
        place_.is_completion = true;
        throw;
    }
    operation->done = true;
    operation->run = nullptr;
    operation->after.clear();
}

// Completes one operation: the oldest (late), or a random one that may go next (seeded).
void AsyncEngines::step() {
    const auto may_go = [](const Operation& copy) {
        return std::all_of(copy->after.begin(), copy->after.end(), [](const Operation& o) { return o->done; });
    };
    Operation chosen;
    if (mode_ == Completion::seeded) {
        std::vector<Operation> ready;
        std::copy_if(copies_.begin(), copies_.end(), std::back_inserter(ready), may_go);
        if (!tensor_pipe_.empty()) ready.push_back(tensor_pipe_.front());
        chosen = ready[random_() % ready.size()];
    } else {  // both queues are in the order of issue
        const auto oldest = std::find_if(copies_.begin(), copies_.end(), may_go);
        if (oldest != copies_.end()) chosen = *oldest;
        const bool has_pipe = !tensor_pipe_.empty();
        if (has_pipe && (!chosen || tensor_pipe_.front()->number < chosen->number)) chosen = tensor_pipe_.front();
    }
    if (chosen->engine == Engine::tensor) {
        tensor_pipe_.erase(tensor_pipe_.begin());
    } else {
        copies_.erase(std::find(copies_.begin(), copies_.end(), chosen));
    }
    complete(chosen);
}

void AsyncEngines::maybe_step() {
    if (mode_ == Completion::seeded && pending() && random_() % 10 < 3) step();
}

void AsyncEngines::join_group(GroupKind kind, const Operation& operation) {
    if (operation) open_groups_[{kind, operation->thread}].push_back(operation);
}

void AsyncEngines::commit_group(GroupKind kind, int thread) {
    if (is_eager()) return;
    auto open = open_groups_.find({kind, thread});
    groups_[{kind, thread}].push_back(open == open_groups_.end() ? std::vector<Operation>{} : std::move(open->second));
    if (open != open_groups_.end()) open_groups_.erase(open);
}

int64_t AsyncEngines::open_count(GroupKind kind, int thread) {
    auto found = groups_.find({kind, thread});
    if (found == groups_.end()) return 0;
    auto& groups = found->second;
    auto is_done = [](const std::vector<Operation>& group) {
        return std::all_of(group.begin(), group.end(), [](const Operation& o) { return o->done; });
    };
    while (!groups.empty() && is_done(groups.front())) groups.erase(groups.begin());
    return int64_t(groups.size());
}

std::vector<Operation> AsyncEngines::unfinished(GroupKind kind, int thread) {
    std::vector<Operation> all;
    auto take = [&all](const std::vector<Operation>& group) {
        for (const Operation& o : group) {
            if (!o->done) all.push_back(o);
        }
    };
    auto closed = groups_.find({kind, thread});
    if (closed != groups_.end()) {
        for (const auto& group : closed->second) take(group);
    }
    auto open = open_groups_.find({kind, thread});
    if (open != open_groups_.end()) take(open->second);
    return all;
}

bool is_ready(Cta& cta, Warp& warp, const Wait& wait) {
    switch (wait.kind) {
        case WaitKind::none:
            return true;
        case WaitKind::mbarrier: {
            auto is_over = [&](uint64_t address, int64_t key) {
                const Mbarrier& cell = cta.shared.mbarrier(address);
                return wait.by_parity ? cell.has_completed(key) : cell.phase > key;
            };
            if (wait.expired || is_over(wait.subject, wait.argument)) return true;
            return std::any_of(wait.others.begin(), wait.others.end(),
                               [&](const auto& other) { return is_over(other.first, other.second); });
        }
        case WaitKind::barrier: {
            NamedBarrier& barrier = barrier_of(cta, int64_t(wait.subject));
            bool everybody = barrier.generation == wait.argument && barrier.expected == 0 &&
                             barrier.arrived >= live_warps_of(cta, int64_t(wait.subject)) * kLanes;
            if (everybody) complete_barrier(cta, barrier);
            return barrier.generation != wait.argument;
        }
        case WaitKind::bulk_group:
        case WaitKind::cp_async_group: {
            auto kind = wait.kind == WaitKind::bulk_group ? AsyncEngines::bulk : AsyncEngines::cp_async;
            return std::all_of(wait.others.begin(), wait.others.end(), [&](const auto& thread) {
                return cta.engines.open_count(kind, int(thread.first)) <= wait.argument;
            });
        }
        case WaitKind::wgmma_group:
            return cta.warpgroups[size_t(warp.number / kGroupWarps)].complete >= wait.argument;
        case WaitKind::tmem_alloc:
            return true;
    }
    return true;
}

namespace {

constexpr int64_t kFixedBudget = 1 << 16;  // a warp that spins on memory must let others run
constexpr int64_t kRandomBudget = 256;
constexpr int64_t kMaxPolls = 64;                         // fruitless polls after which a CTA counts as spinning
constexpr int64_t kMaxInstructionsWithoutProgress = 1 << 24;

void sweep(Cta& cta) {
    for (Warp& warp : cta.warps) {
        if (!warp.groups.empty()) execute_warp(cta, warp, kFixedBudget);
    }
}

void run_at_random(Cta& cta) {
    for (size_t i = 0; i < cta.warps.size(); ++i) {
        Warp& warp = cta.warps[cta.random() % cta.warps.size()];
        if (!warp.groups.empty()) execute_warp(cta, warp, 1 + int64_t(cta.random() % kRandomBudget));
        cta.engines.maybe_step();
    }
}

// Lanes that wait for other lanes of their warp: let one group go ahead of the lanes furthest behind.
bool overtake(Cta& cta) {
    const int64_t before = cta.instructions;
    for (Warp& warp : cta.warps) {
        try {
            if (warp.groups.size() > 1) execute_warp(cta, warp, 1, true);
        } catch (const Fault& fault) {
            if (fault.rule != kPartialWarp.id) throw;  // a collective needs the lanes that wait: these cannot go ahead
        }
        if (cta.instructions != before) return true;
    }
    return false;
}

// A try_wait may time out: let all of them come back false where nothing else can happen.
bool expire_waits(Cta& cta) {
    bool any = false;
    for (Warp& warp : cta.warps) {
        for (Group& group : warp.groups) {
            if (group.wait.kind != WaitKind::mbarrier || !group.wait.can_expire) continue;
            group.wait.expired = any = true;
        }
    }
    return any;
}

}  // namespace

bool run_cluster(Cluster& cluster) {
    const auto each = [&cluster](auto&& body) {
        for (auto& cta : cluster.ctas) {
            cluster.current = cta.get();
            if (body(*cta)) return true;
        }
        return false;
    };
    const auto step_engines = [&each] {
        return each([](Cta& cta) {
            if (!cta.engines.pending()) return false;
            cta.engines.step();
            return true;
        });
    };
    int64_t progress = cluster.progress(), polls = cluster.polls(), since = cluster.instructions(), expired_at = -1;
    while (!cluster.finished()) {
        const int64_t before = cluster.instructions();
        each([](Cta& cta) {
            const int64_t own = cta.instructions;
            if (cta.launch.is_random_schedule) run_at_random(cta);
            if (cta.instructions == own) sweep(cta);
            return false;
        });
        const bool is_stuck = cluster.instructions() == before;
        bool is_spinning = false;
        if (cluster.progress() != progress) {
            progress = cluster.progress();
            polls = cluster.polls();
            since = cluster.instructions();
        } else if (cluster.polls() - polls > kMaxPolls ||
                   cluster.instructions() - since > kMaxInstructionsWithoutProgress) {
            polls = cluster.polls();
            since = cluster.instructions();
            is_spinning = true;
        }
        if (!is_stuck && !is_spinning) continue;
        if (step_engines()) {
            continue;
        } else if (is_spinning) {
            return false;
        } else if (each(overtake)) {
            continue;
        }
        const bool may_expire = expired_at != cluster.progress();
        bool any_expires = false;
        if (may_expire) {
            each([&any_expires](Cta& cta) {
                any_expires |= expire_waits(cta);
                return false;
            });
        }
        if (!any_expires) fail(FaultKind::deadlock, "deadlock: no warp can run and nothing is in flight");
        expired_at = cluster.progress();
    }
    while (step_engines()) {
    }
    each([](Cta& cta) {
        for (size_t i = 0; i < cta.warpgroups.size(); ++i) cta.warpgroups[i].check_end(int(i));
        return false;
    });
    return true;
}

}  // namespace undertow
