// The memories of the machine: bounds, alignment, poison and mbarrier cells; nothing here knows instructions.
// Texts of faults equal those of the Python classes in undertow/emulator/memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fault.hpp"

namespace undertow {

constexpr uint8_t kPoisonByte = 0xCD;

// One device buffer: addresses [base, end) over host memory. `is_reduced` is set once a CTA has put off a reduction
// into it: from then on other accesses wait until their CTA's turn in the order of commits.
struct Buffer {
    uint64_t base;
    uint64_t end;
    uint8_t* host;
    bool writable;
    std::string label;
    std::atomic<bool> is_reduced{false};

    Buffer(uint64_t base_, uint64_t size, uint8_t* host_, bool writable_, std::string label_)
        : base(base_), end(base_ + size), host(host_), writable(writable_), label(std::move(label_)) {}
};

class GlobalMemory {
public:
    std::vector<std::unique_ptr<Buffer>> buffers;  // ascending by base

    // The buffer that holds [address, address + size); a fault names the nearest one.
    Buffer& find(uint64_t address, uint64_t size) const;
};

struct Mbarrier {
    uint64_t address;
    int64_t count;    // arrivals that each phase expects
    int64_t pending;  // arrivals missing in this phase
    int64_t tx;       // bytes expected minus bytes landed
    int64_t phase;    // completed phases since init

    void arrive(int64_t arrivals, bool drop);
    void expect(int64_t num_bytes);
    void complete(int64_t num_bytes);
    bool has_completed(int64_t parity) const { return (phase & 1) != parity; }

private:
    void maybe_complete();
};

class SharedMemory {
public:
    SharedMemory(uint64_t base, uint64_t size);

    void reset();
    uint8_t* at(uint64_t address) { return bytes_.data() + address; }
    const uint8_t* at(uint64_t address) const { return bytes_.data() + address; }
    uint64_t base() const { return base_; }
    uint64_t end() const { return end_; }
    // Whether [low, high) may touch an mbarrier; cheap and pessimistic.
    bool near_cells(uint64_t low, uint64_t high) const { return low < cells_end_ && high > cells_begin_; }
    bool covers_cell(uint64_t address, uint64_t num_bytes) const;
    void check_range(uint64_t address, uint64_t num_bytes) const;
    void init_mbarrier(uint64_t address, int64_t count);
    void inval_mbarrier(uint64_t address);
    Mbarrier& mbarrier(uint64_t address);

private:
    uint64_t base_, end_;
    std::vector<uint8_t> bytes_;  // index is the address
    std::vector<int32_t> cell_of_word_;  // by address / 8; negative: none
    std::vector<Mbarrier> cells_;
    uint64_t cells_begin_, cells_end_;
};

// Tensor memory, column by column: the 128 rows of a column are contiguous, so that 32 lanes move at once.
class TensorMemory {
public:
    static constexpr int kRows = 128, kColumns = 512;
    static constexpr uint32_t kPoison = 0x7FC0DEADu;

    TensorMemory() : cells_(kRows * kColumns) { reset(); }

    void reset();
    uint32_t* column(int64_t c) { return cells_.data() + c * kRows; }
    int64_t allocate(int64_t num_columns);  // -1: no room now
    void deallocate(int64_t column, int64_t num_columns);
    void check(int64_t column, int64_t num_columns, const char* what) const;
    std::string describe() const;

    bool may_allocate = true;
    std::map<int64_t, int64_t> allocations;  // first column -> number of columns

private:
    void poison(int64_t column, int64_t num_columns);

    std::vector<uint32_t> cells_;
};

}  // namespace undertow
