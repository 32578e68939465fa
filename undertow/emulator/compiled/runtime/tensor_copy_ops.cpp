// Tensor copies through tensor maps, tile mode: see semantics/tensor_copy.py and tensor_map.py.
#include <algorithm>
#include <cstring>

#include "cluster.hpp"
#include "operands.hpp"

namespace undertow {

using ull = unsigned long long;

namespace {

constexpr uint64_t kChunk = 16;

uint64_t swizzled(uint64_t address, int swizzle) {
    return swizzle ? address ^ (((address >> 7) & uint64_t(swizzle / 16 - 1)) << 4) : address;
}

uint64_t box_bytes(const TensorMap& map) {
    uint64_t bytes = uint64_t(map.element_bytes);
    for (int d = 0; d < map.rank; ++d) bytes *= uint64_t(map.box[d]);
    return bytes;
}

// The part of a box that lies inside the tensor: box positions [starts, ends), first byte at `address`.
struct Window {
    Window(const TensorMap& m, const int32_t* corner) : map(m), address(m.address) {
        last = 0;
        for (int d = 0; d < m.rank; ++d) {
            starts[d] = std::max<int64_t>(0, -int64_t(corner[d]));
            ends[d] = std::max<int64_t>(0, std::min<int64_t>(m.box[d], m.dims[d] - corner[d]));
            is_empty |= starts[d] >= ends[d];
            address += uint64_t((corner[d] + starts[d]) * m.strides[d]);
            if (d) last += uint64_t((ends[d] - starts[d] - 1) * m.strides[d]);
        }
        row_bytes = uint64_t((ends[0] - starts[0]) * m.element_bytes);
        last += address + row_bytes;
    }

    Buffer& buffer(Cta& cta) const {
        Buffer& found = cta.global_buffer(address, last, 1);
        if (last > found.end) {
            fail(FaultKind::memory,
                 "tensor copy of [%#llx, %#llx) leaves %s [%#llx, %#llx): the map's dims or strides do not fit the"
                 " buffer",
                 ull(address), ull(last), found.label.c_str(), ull(found.base), ull(found.end));
        }
        return found;
    }

    const TensorMap& map;
    uint64_t address, last, row_bytes;  // [address, last) spans the window
    int64_t starts[5] = {}, ends[5] = {};
    bool is_empty = false;
};

// Calls body(row number in the box, global offset from the window's first byte or -1 for a row outside).
template <class Body>
void for_each_row(const Window& window, Body&& body) {
    const TensorMap& map = window.map;
    int64_t index[5] = {};
    int64_t num_rows = 1;
    for (int d = 1; d < map.rank; ++d) num_rows *= map.box[d];
    for (int64_t row = 0; row < num_rows; ++row) {
        int64_t offset = 0;
        bool is_inside = !window.is_empty;
        for (int d = 1; d < map.rank; ++d) {
            is_inside &= index[d] >= window.starts[d] && index[d] < window.ends[d];
            offset += (index[d] - window.starts[d]) * map.strides[d];
        }
        body(row, is_inside ? offset : int64_t(-1));
        for (int d = 1; d < map.rank && ++index[d] == map.box[d]; ++d) index[d] = 0;
    }
}

const TensorMap& find_map(const Context& c, uint64_t address) {
    const auto& maps = c.cta.launch.tensor_maps;
    const uint64_t offset = address >= kParamWindow ? address - kParamWindow : address;
    auto found = maps.find(offset);
    if (found == maps.end() && address < kParamWindow && address >> 32) {
        fail(FaultKind::unsupported, "tensor map in global memory at %#llx: pass it as a parameter", ull(address));
    }
    if (found == maps.end()) {
        fail(FaultKind::memory, "no TensorMap was described for the parameter at offset %llu", ull(offset));
    }
    const int rank = c.inst.aux[0], num_coordinates = c.inst.aux[1];
    if (rank != found->second.rank || num_coordinates != rank) {
        fail(FaultKind::memory, "%d-dimensional tensor copy with %d coordinates through a map of %d dimensions", rank,
             num_coordinates, found->second.rank);
    }
    return found->second;
}

void check_shared(const Cta& cta, uint64_t address, const TensorMap& map) {
    if (address % 128) {
        fail(FaultKind::memory, "tensor copy at shared address %#llx, which is not a multiple of 128", ull(address));
    }
    cta.shared.check_range(address, box_bytes(map));
}

struct Corner {
    explicit Corner(const uint64_t* coordinates) {
        for (int d = 0; d < 5; ++d) at[d] = int32_t(uint32_t(coordinates[d]));
    }
    int32_t at[5];
};

void fill_outside(uint8_t* row, uint64_t num_bytes, const TensorMap& map) {
    std::memset(row, 0, num_bytes);
    if (!map.fill_nan) return;
    const uint64_t pattern = map.element_bytes == 2 ? 0x7fff : map.element_bytes == 4 ? 0x7fffffff : ~uint64_t(0) >> 1;
    for (uint64_t i = 0; i < num_bytes; i += uint64_t(map.element_bytes)) {
        std::memcpy(row + i, &pattern, size_t(map.element_bytes));
    }
}

void load_box(Cta& cta, SharedMemory& shared, const TensorMap& map, const Corner& corner, uint64_t target) {
    const Window window(map, corner.at);
    const uint8_t* first = nullptr;
    if (!window.is_empty) {
        Buffer& buffer = window.buffer(cta);
        cta.before_access(buffer);
        first = buffer.host + (window.address - buffer.base);
    }
    const uint64_t inner = uint64_t(map.box[0]) * uint64_t(map.element_bytes);
    const uint64_t skipped = uint64_t(window.starts[0]) * uint64_t(map.element_bytes);
    uint8_t staged[256 * 8];
    for_each_row(window, [&](int64_t row, int64_t offset) {
        const uint8_t* from = staged;
        if (offset >= 0 && window.row_bytes == inner) {
            from = first + offset;
        } else {
            fill_outside(staged, inner, map);
            if (offset >= 0) std::memcpy(staged + skipped, first + offset, window.row_bytes);
        }
        const uint64_t linear = target + uint64_t(row) * inner;
        for (uint64_t i = 0; i < inner; i += kChunk) {
            std::memcpy(shared.at(swizzled(linear + i, map.swizzle)), from + i, kChunk);
        }
    });
}

void store_box(Cta& cta, const TensorMap& map, const Corner& corner, uint64_t source, int reduction) {
    const Window window(map, corner.at);
    if (window.is_empty) return;
    Buffer& buffer = window.buffer(cta);
    if (!buffer.writable) {
        fail(FaultKind::memory, "write to %s, which is read-only on the host", buffer.label.c_str());
    }
    if (reduction < 0) cta.before_access(buffer);
    const uint64_t inner = uint64_t(map.box[0]) * uint64_t(map.element_bytes);
    const uint64_t skipped = uint64_t(window.starts[0]) * uint64_t(map.element_bytes);
    uint8_t staged[256 * 8];
    for_each_row(window, [&](int64_t row, int64_t offset) {
        if (offset < 0) return;
        const uint64_t linear = source + uint64_t(row) * inner;
        for (uint64_t i = 0; i < inner; i += kChunk) {
            std::memcpy(staged + i, cta.shared.at(swizzled(linear + i, map.swizzle)), kChunk);
        }
        const uint64_t place = window.address - buffer.base + uint64_t(offset);
        if (reduction < 0) {
            std::memcpy(buffer.host + place, staged + skipped, window.row_bytes);
        } else {
            cta.reduce_global(buffer, place, staged + skipped, window.row_bytes, reduction, map.type);
        }
    });
}

}  // namespace

// aux: 0 rank of the instruction, 1 number of coordinates, 3 whether it is a multicast. Operands: destination, mbarrier,
// ranks of a multicast, map, coordinates.
Step op_tensor_load(Context& c) {
    Cta& cta = c.cta;
    const bool spreads = c.inst.aux[3];
    for_distinct(c, [&](int lane, const Operands& v) {
        const uint64_t* rest = &v[spreads ? 3 : 2];
        const TensorMap& map = find_map(c, rest[0]);
        const Destinations to = destinations(cta, v[0], v[1], spreads ? int64_t(v[2]) : -1);
        const Corner corner(rest + 1);
        for (int i = 0; i < to.count; ++i) check_shared(*to.homes[size_t(i)], to.target, map);
        cta.engines.issue(Engine::tensor_load, c.thread(lane), [&cta, &map, corner, to] {
            for (int i = 0; i < to.count; ++i) {
                Cta& home = *to.homes[size_t(i)];
                home.shared.check_range(to.target, box_bytes(map));
                load_box(cta, home.shared, map, corner, to.target);
                home.shared.mbarrier(to.barrier).complete(int64_t(box_bytes(map)));
                home.progress += 1;
            }
        });
    });
    return Step::next;
}

// aux: as above, 2 AtomicOp of a reducing copy or -1. Operands: source, map, coordinates.
Step op_tensor_store(Context& c) {
    Cta& cta = c.cta;
    const int reduction = c.inst.aux[2];
    for_distinct(c, [&](int lane, const Operands& v) {
        const TensorMap& map = find_map(c, v[1]);
        const uint64_t source = shared_address(v[0]);
        const Corner corner(&v[2]);
        check_shared(cta, source, map);
        auto run = [&cta, &map, corner, source, reduction] {
            cta.shared.check_range(source, box_bytes(map));
            cta.progress += 1;
            if (reduction >= 0 && map.type < 0) {
                fail(FaultKind::unsupported, "reducing tensor copy of an element type that has no reduction");
            }
            store_box(cta, map, corner, source, reduction);
        };
        const Engine engine = reduction < 0 ? Engine::bulk_store : Engine::bulk_reduce;
        cta.engines.join_group(AsyncEngines::bulk, cta.engines.issue(engine, c.thread(lane), run));
    });
    return Step::next;
}

}  // namespace undertow
