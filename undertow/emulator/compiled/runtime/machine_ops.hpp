// Numbers of the operations that the interpreter executes itself; all others are machine forms, found by name.
#pragma once

namespace undertow {

constexpr int kLaneOp = 0;
constexpr int kBranch = 1;
constexpr int kExit = 2;
constexpr int kIndexedBranch = 3;
constexpr int kTrap = 4;
constexpr int kFirstMachineOp = 8;

// Inst::index of a helper move in front of its instruction; one behind has -2.
constexpr int kBefore = -1;

}  // namespace undertow
