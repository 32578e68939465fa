// Fetch, guard, dispatch, diverge, reconverge.
//
// Lanes of a warp that sit at different instructions form groups; the group with the lowest program counter that can
// run goes first, and groups that meet merge. That reconverges as the NumPy machine does.
#include <algorithm>
#include <climits>

#include "cluster.hpp"
#include "machine_ops.hpp"

namespace undertow {

uint32_t Warp::live_mask() const {
    uint32_t mask = 0;
    for (const Group& group : groups) mask |= group.mask;
    return mask;
}

void Warp::merge_groups() {
    if (groups.size() < 2) return;
    std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.pc < b.pc; });
    size_t kept = 0;
    for (size_t i = 1; i < groups.size(); ++i) {
        if (groups[i].pc == groups[kept].pc) {
            groups[kept].mask |= groups[i].mask;
            groups[kept].wait = Wait{};
        } else {
            groups[++kept] = groups[i];
        }
    }
    groups.resize(kept + 1);
}

namespace {

// Runs one group until it blocks, exits, leaves its lanes behind or meets the next group.
class GroupRun {
public:
    GroupRun(Cta& cta, Warp& warp) : cta_(cta), warp_(warp), place_(cta.at) {}

    void run(size_t which, int64_t& budget) {
        const Program& program = *cta_.launch.program;
        const Inst* code = program.code.data();
        const char* consts = program.consts.data();
        char* regs = warp_.regs;
        int64_t* executions = cta_.executions.data();
        int pc = warp_.groups[which].pc;
        const uint32_t active = warp_.groups[which].mask;
        const int limit = which + 1 < warp_.groups.size() ? warp_.groups[which + 1].pc : INT_MAX;
        int64_t num_executed = 0;
        bool is_blocked = false, has_left = false;
        warp_.groups[which].wait.kind = WaitKind::none;
        while (pc < limit && num_executed < budget) {
            const Inst& inst = code[pc];
            uint32_t mask = active;
            if (inst.guard >= 0) mask &= *target<uint32_t>(regs, inst.guard) ^ inst.guard_flip;
            if (inst.op == kLaneOp) {
                if (mask) inst.lane(regs, consts, inst, mask);
                ++pc;
            } else if (inst.op == kBranch) {
                if (mask == active) {
                    pc = inst.aux[0];
                } else if (mask == 0) {
                    ++pc;
                } else {
                    executions[inst.index] += 1;
                    ++num_executed;
                    warp_.groups[which] = Group{pc + 1, active & ~mask, {}};
                    warp_.groups.push_back(Group{inst.aux[0], mask, {}});
                    has_left = true;
                    break;
                }
            } else if (inst.op < kFirstMachineOp) {
                executions[inst.index] += 1;
                ++num_executed;
                leave(which, inst, pc, active, mask);
                has_left = true;
                break;
            } else {
                if (mask) {
                    place_.warp = warp_.number;
                    place_.code = pc;
                    place_.mask = active;
                    Context context{cta_, warp_, warp_.groups[which], inst, mask, program};
                    const Step step = machine_forms[inst.op - kFirstMachineOp].handler(context);
                    if (step == Step::blocked) {
                        is_blocked = true;
                        while (pc > 0 && code[pc - 1].index == kBefore) --pc;
                        break;
                    }
                    if (step == Step::yield) budget = 0;
                }
                ++pc;
            }
            if (inst.index < 0) continue;
            executions[inst.index] += 1;
            ++num_executed;
        }
        if (!has_left) warp_.groups[which].pc = pc;
        cta_.instructions += num_executed;
        budget -= num_executed;
        if (!is_blocked || warp_.groups.size() > 1) warp_.merge_groups();
    }

private:
    // Exit, trap and indexed branches: the rare ways to leave.
    void leave(size_t which, const Inst& inst, int pc, uint32_t active, uint32_t mask) {
        if (inst.op == kExit) {
            if (active & ~mask) {
                warp_.groups[which] = Group{pc + 1, active & ~mask, {}};
            } else {
                warp_.groups.erase(warp_.groups.begin() + long(which));
                if (warp_.groups.empty()) cta_.cluster->stir();
            }
            return;
        }
        place_.warp = warp_.number;
        place_.code = pc;
        place_.mask = active;
        if (inst.op == kTrap) {
            if (mask) fail(FaultKind::protocol, "trap executed");
            warp_.groups[which].pc = pc + 1;
            return;
        }
        const Program& program = *cta_.launch.program;
        const uint32_t* choice = source<uint32_t>(warp_.regs, program.consts.data(), inst.s[0]);
        const int32_t* targets = program.lists.data() + inst.aux[0];
        warp_.groups.erase(warp_.groups.begin() + long(which));
        if (active & ~mask) warp_.groups.push_back(Group{pc + 1, active & ~mask, {}});
        for (uint32_t left = mask; left; left &= left - 1) {
            int lane = __builtin_ctz(left);
            if (choice[lane] >= uint32_t(targets[0])) {
                fail(FaultKind::protocol, "brx.idx with index %u, the table has %d targets", choice[lane], targets[0]);
            }
            warp_.groups.push_back(Group{targets[1 + choice[lane]], 1u << lane, {}});
        }
    }

    Cta& cta_;
    Warp& warp_;
    Place& place_;
};

}  // namespace

void execute_warp(Cta& cta, Warp& warp, int64_t budget, bool may_overtake) {
    GroupRun run(cta, warp);
    while (budget > 0) {
        const size_t num_choices = may_overtake ? warp.groups.size() : std::min<size_t>(1, warp.groups.size());
        size_t which = 0;
        while (which < num_choices && !is_ready(cta, warp, warp.groups[which].wait)) ++which;
        if (which == num_choices) return;
        run.run(which, budget);
    }
}

}  // namespace undertow
