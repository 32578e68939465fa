// Asynchronous copies: cp.async, cp.async.bulk, cp.reduce.async.bulk, their groups, st.bulk.
// See semantics/asynchronous_copy.py and semantics/bulk_copy.py.
#include <algorithm>
#include <cstring>

#include "cluster.hpp"
#include "operands.hpp"

namespace undertow {

using ull = unsigned long long;

uint64_t global_address(uint64_t value) {
    if (value >= kSharedWindow) {
        fail(FaultKind::protocol, "address %#llx of an asynchronous copy is not in global memory", ull(value));
    }
    return value;
}

namespace {

void check_bulk(uint64_t size, uint64_t first, uint64_t second) {
    if (size % 16 || first % 16 || second % 16) {
        fail(FaultKind::memory, "bulk copy of %llu bytes between %#llx, %#llx: all must be multiples of 16", ull(size),
             ull(first), ull(second));
    }
}

void check_writable(const Buffer& buffer) {
    if (!buffer.writable) {
        fail(FaultKind::memory, "write to %s, which is read-only on the host", buffer.label.c_str());
    }
}

// Bytes [address, address + size) of global memory.
uint8_t* global_bytes(Cta& cta, uint64_t address, uint64_t size, bool is_write) {
    Buffer& buffer = cta.global_buffer(global_address(address), address + size, size);
    if (is_write) check_writable(buffer);
    cta.before_access(buffer);
    return buffer.host + (address - buffer.base);
}

}  // namespace

// Operands: destination, source, bytes, mbarrier, ranks of a multicast. aux: 0 whether the source is shared memory as
// well, 1 whether it is a multicast, 2 AtomicOp | AtomicType << 8, or -1 for a plain copy.
Step op_bulk_load(Context& c) {
    Cta& cta = c.cta;
    const bool from_shared = c.inst.aux[0], spreads = c.inst.aux[1];
    const int reduction = c.inst.aux[2];
    for_distinct(c, [&](int lane, const Operands& v) {
        const uint64_t source = from_shared ? shared_address(v[1]) : v[1], num_bytes = v[2];
        check_bulk(num_bytes, v[0], source);
        const Destinations to = destinations(cta, v[0], v[3], spreads ? int64_t(v[4]) : -1);
        cta.engines.issue(Engine::bulk_load, c.thread(lane), [&cta, to, source, num_bytes, from_shared, reduction] {
            for (int i = 0; i < to.count; ++i) to.homes[size_t(i)]->shared.check_range(to.target, num_bytes);
            const uint8_t* data = nullptr;
            if (from_shared) {
                cta.shared.check_range(source, num_bytes);
                data = cta.shared.at(source);
            } else if (num_bytes) {
                data = global_bytes(cta, source, num_bytes, false);
            }
            for (int i = 0; i < to.count; ++i) {
                Cta& home = *to.homes[size_t(i)];
                uint8_t* place = home.shared.at(to.target);
                if (num_bytes && reduction < 0) std::memmove(place, data, num_bytes);
                if (num_bytes && reduction >= 0) {
                    reduce_bytes(place, data, num_bytes, AtomicOp(reduction & 0xff), AtomicType(reduction >> 8));
                }
                home.shared.mbarrier(to.barrier).complete(int64_t(num_bytes));
                home.progress += 1;
            }
        });
    });
    return Step::next;
}

// Operands: destination, source, bytes; aux[0]: AtomicOp | AtomicType << 8, or -1 for a plain copy.
Step op_bulk_to_global(Context& c) {
    Cta& cta = c.cta;
    const int reduction = c.inst.aux[0];
    for_distinct(c, [&](int lane, const Operands& v) {
        const uint64_t target = v[0], source = shared_address(v[1]), num_bytes = v[2];
        check_bulk(num_bytes, target, source);
        auto run = [&cta, target, source, num_bytes, reduction] {
            if (!num_bytes) return;
            cta.shared.check_range(source, num_bytes);
            cta.progress += 1;
            if (reduction < 0) {
                std::memcpy(global_bytes(cta, target, num_bytes, true), cta.shared.at(source), num_bytes);
                return;
            }
            Buffer& buffer = cta.global_buffer(global_address(target), target + num_bytes, num_bytes);
            check_writable(buffer);
            cta.reduce_global(buffer, target - buffer.base, cta.shared.at(source), num_bytes, reduction & 0xff,
                              reduction >> 8);
        };
        const Engine engine = reduction < 0 ? Engine::bulk_store : Engine::bulk_reduce;
        cta.engines.join_group(AsyncEngines::bulk, cta.engines.issue(engine, c.thread(lane), run));
    });
    return Step::next;
}

// Per lane. Operands: destination, source, bytes, bytes that are not zero-filled; aux[0]: whether the last is given.
Step op_cp_async(Context& c) {
    Cta& cta = c.cta;
    const bool has_limit = c.inst.aux[0];
    each_lane(c.mask, [&](int lane) {
        const Operands v = lane_operands(c, lane);
        const uint64_t target = shared_address(v[0]), source = v[1], size = v[2];
        if (size != 4 && size != 8 && size != 16) {
            fail(FaultKind::protocol, "cp.async of %llu bytes; allowed are 4, 8 and 16", ull(size));
        }
        const uint64_t valid = has_limit ? std::min(v[3], size) : size;
        auto run = [&cta, target, source, size, valid] {
            uint8_t data[16] = {};
            if (valid) std::memcpy(data, global_bytes(cta, source, valid, false), valid);
            SharedMemory& shared = cta.shared;
            if (shared.near_cells(target, target + size) && shared.covers_cell(target, size)) {
                fail(FaultKind::memory, "ordinary access of %llu bytes at %#llx touches an mbarrier", ull(size),
                     ull(target));
            }
            shared.check_range(target, size);
            if (target % size) {
                fail(FaultKind::memory, "%llu bytes at %#llx in shared memory are not aligned to their size",
                     ull(size), ull(target));
            }
            std::memcpy(shared.at(target), data, size);
            cta.progress += 1;
        };
        cta.engines.join_group(AsyncEngines::cp_async, cta.engines.issue(Engine::cp_async, c.thread(lane), run));
    });
    return Step::next;
}

// aux[0]: AsyncEngines::GroupKind.
Step op_commit_group(Context& c) {
    const auto kind = AsyncEngines::GroupKind(c.inst.aux[0]);
    each_lane(c.mask, [&](int lane) { c.cta.engines.commit_group(kind, c.thread(lane)); });
    return Step::next;
}

// aux: 0 kind, 1 whether open groups are closed first (cp.async.wait_all); s[0]: groups that may stay open (or -1).
Step op_wait_group(Context& c) {
    AsyncEngines& engines = c.cta.engines;
    const auto kind = AsyncEngines::GroupKind(c.inst.aux[0]);
    const int64_t allowed = c.inst.aux[1] ? 0 : c.row<uint32_t>(c.inst.s[0])[c.lane()];
    Wait wait;
    each_lane(c.mask, [&](int lane) {
        const int thread = c.thread(lane);
        if (c.inst.aux[1] && engines.has_open_group(kind, thread)) engines.commit_group(kind, thread);
        if (engines.open_count(kind, thread) > allowed) wait.others.emplace_back(uint64_t(thread), 0);
    });
    if (wait.others.empty()) return Step::next;
    wait.kind = kind == AsyncEngines::bulk ? WaitKind::bulk_group : WaitKind::cp_async_group;
    wait.subject = uint64_t(allowed);
    wait.argument = allowed;
    c.group.wait = wait;
    return Step::blocked;
}

// Arrive when all earlier cp.async of the thread are done. Operands: mbarrier; aux[0]: .noinc.
Step op_cp_async_arrive(Context& c) {
    Cta& cta = c.cta;
    each_lane(c.mask, [&](int lane) {
        const uint64_t barrier = shared_address(lane_operands(c, lane)[0]);
        Mbarrier& cell = cta.shared.mbarrier(barrier);
        if (!c.inst.aux[0]) cell.pending += 1;
        auto earlier = cta.engines.unfinished(AsyncEngines::cp_async, c.thread(lane));
        auto run = [&cta, barrier] {
            cta.shared.mbarrier(barrier).arrive(1, false);
            cta.progress += 1;
        };
        cta.engines.issue(Engine::cp_async, c.thread(lane), run, std::move(earlier));
    });
    return Step::next;
}

// Operands: address, bytes, value.
Step op_st_bulk(Context& c) {
    for_distinct(c, [&](int, const Operands& v) {
        const uint64_t target = shared_address(v[0]);
        if (v[2] || v[1] % 8 || target % 8) {
            fail(FaultKind::memory, "st.bulk of %llu bytes at %#llx with %llu: multiples of 8, value 0", ull(v[1]),
                 ull(target), ull(v[2]));
        }
        c.cta.shared.check_range(target, v[1]);
        std::memset(c.cta.shared.at(target), 0, v[1]);
    });
    return Step::next;
}

}  // namespace undertow
