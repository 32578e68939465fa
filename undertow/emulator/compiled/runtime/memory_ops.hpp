// Finding the memory behind the addresses of a warp's lanes; one instance per executed instruction.
#pragma once

#include "machine.hpp"

namespace undertow {

enum class Space : int { generic = 0, global, shared, local, param };
enum class AccessKind { read, write, atomic };

// Addresses of all lanes: a row plus an offset; 32-bit addresses wrap at 32 bits.
void lane_addresses(const Context& c, int32_t ref, bool is_wide, int64_t offset, uint64_t* addresses);

struct MemoryAccess {
    MemoryAccess(const Context& context, AccessKind access);

    template <class Body>
    void for_each_memory(Body&& body);

    const Context& c;
    AccessKind kind;
    Space space;
    uint64_t size;  // bytes per lane
    alignas(64) uint64_t addresses[kLanes];

private:
    template <class Body>
    void in_space(Space where, uint32_t lanes, Body&& body);
    template <class Body>
    void in_cluster(uint32_t lanes, Body&& body);
    static Space space_of_window(uint64_t high);
};

}  // namespace undertow
