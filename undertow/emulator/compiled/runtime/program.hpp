// The encoded form of a kernel, shared between Python (encode.py writes it) and the interpreter.
#pragma once

#include <cstdint>
#include <cstring>

namespace undertow {

constexpr int kLanes = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

struct Inst;

// One PTX lane form over the active lanes of a warp. `regs` is the warp's register file, `consts` the program's
// constant rows; a row holds one value per lane, a predicate row is one 32-bit mask.
using LaneHandler = void (*)(char* regs, const char* consts, const Inst& inst, uint32_t mask);

// Layout is mirrored by encode.INST; operands are byte offsets of rows, negative ones (bit 31) into `consts`.
struct Inst {
    LaneHandler lane;    // Python writes the handler's number here, linking turns it into a pointer; null: machine form
    int32_t op;          // MachineOp
    int32_t index;       // PTX instruction; negative for the helper moves around one, which are not counted
    int32_t guard;       // predicate row or -1
    uint32_t guard_flip; // all ones for @!p
    int32_t d[2];
    int32_t s[6];
    int32_t aux[8];      // meaning depends on `op`: see machine_ops.hpp
    int64_t imm;
};
static_assert(sizeof(Inst) == 96, "encode.INST mirrors this layout");

template <class T>
inline const T* source(const char* regs, const char* consts, int32_t ref) {
    return reinterpret_cast<const T*>((ref < 0 ? consts : regs) + (ref & 0x7fffffff));
}

template <class T>
inline T* target(char* regs, int32_t ref) {
    return reinterpret_cast<T*>(regs + ref);
}

}  // namespace undertow
