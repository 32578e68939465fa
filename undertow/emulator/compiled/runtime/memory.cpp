#include "memory.hpp"

#include <algorithm>
#include <cstring>

namespace undertow {

using ull = unsigned long long;

constexpr int32_t kNoCell = -1, kEndedCell = -2;  // in cell_of_word_
constexpr Rule kLifetime{"tmem-lifetime"};
constexpr int64_t kMaxCount = (1 << 20) - 1;

Buffer& GlobalMemory::find(uint64_t address, uint64_t size) const {
    const auto next = std::upper_bound(buffers.begin(), buffers.end(), address,
                                       [](uint64_t a, const std::unique_ptr<Buffer>& b) { return a < b->base; });
    Buffer* below = next == buffers.begin() ? nullptr : (next - 1)->get();
    if (below && address + size <= below->end) return *below;
    const Buffer* above = next == buffers.end() ? nullptr : next->get();
    const auto refuse = [&](const Buffer& nearest, const char* what, uint64_t distance, const char* side) {
        fail(FaultKind::memory, "%llu bytes at %#llx are outside %s [%#llx, %#llx): they %s %llu bytes %s it",
             ull(size), ull(address), nearest.label.c_str(), ull(nearest.base), ull(nearest.end), what,
             ull(distance), side);
    };
    if (above && (!below || above->base - address < address - below->end)) {
        refuse(*above, "begin", above->base - address, "before");
    }
    if (below) refuse(*below, "end", address + size - below->end, "past");
    fail(FaultKind::memory, "%llu bytes at %#llx are outside every buffer: the launch has none", ull(size),
         ull(address));
}

void Mbarrier::arrive(int64_t arrivals, bool drop) {
    if (arrivals > pending) {
        fail(FaultKind::protocol, Rule{"mbarrier-over-arrival"},
             "over-arrival at mbarrier %#llx: %lld arrivals, %lld of %lld pending in phase %lld", ull(address),
             (long long)arrivals, (long long)pending, (long long)count, (long long)phase);
    }
    pending -= arrivals;
    if (drop) count -= arrivals;
    maybe_complete();
}

void Mbarrier::expect(int64_t num_bytes) {
    tx += num_bytes;
    if (std::abs(tx) > kMaxCount) {
        fail(FaultKind::protocol, Rule{"mbarrier-bytes"},
             "transaction count of mbarrier %#llx leaves its range: %lld bytes", ull(address), (long long)tx);
    }
}

void Mbarrier::complete(int64_t num_bytes) {
    expect(-num_bytes);
    maybe_complete();
}

void Mbarrier::maybe_complete() {
    if (pending == 0 && tx == 0) {
        phase += 1;
        pending = count;
    }
}

SharedMemory::SharedMemory(uint64_t base, uint64_t size)
    : base_(base), end_(base + size), bytes_((base + size + 127) / 128 * 128), cell_of_word_(bytes_.size() / 8) {
    reset();
}

void SharedMemory::reset() {
    std::fill(bytes_.begin(), bytes_.end(), kPoisonByte);
    std::fill(cell_of_word_.begin(), cell_of_word_.end(), kNoCell);
    cells_.clear();
    cells_begin_ = ~uint64_t(0);
    cells_end_ = 0;
}

bool SharedMemory::covers_cell(uint64_t address, uint64_t num_bytes) const {
    uint64_t last = std::min<uint64_t>((address + num_bytes + 7) / 8, cell_of_word_.size());
    for (uint64_t word = address / 8; word < last; ++word) {
        if (cell_of_word_[word] >= 0) return true;
    }
    return false;
}

void SharedMemory::check_range(uint64_t address, uint64_t num_bytes) const {
    if (address < base_ || address + num_bytes > end_) {
        fail(FaultKind::memory, "%llu bytes at %#llx are outside shared memory [%#llx, %#llx)", ull(num_bytes),
             ull(address), ull(base_), ull(end_));
    }
    if (num_bytes && near_cells(address, address + num_bytes) && covers_cell(address, num_bytes)) {
        fail(FaultKind::memory, "a block of %llu bytes at %#llx covers an mbarrier", ull(num_bytes), ull(address));
    }
}

void SharedMemory::init_mbarrier(uint64_t address, int64_t count) {
    if (count < 1 || count > kMaxCount) {
        fail(FaultKind::protocol, Rule{"mbarrier-count"},
             "mbarrier.init at %#llx with count %lld; allowed are 1 to %lld", ull(address), (long long)count,
             (long long)kMaxCount);
    }
    if (address % 8) fail(FaultKind::memory, "mbarrier at %#llx is not aligned to 8 bytes", ull(address));
    if (address / 8 < cell_of_word_.size() && cell_of_word_[address / 8] >= 0) {
        fail(FaultKind::protocol, Rule{"mbarrier-reinitialised"},
             "mbarrier.init at %#llx, where an mbarrier is live; mbarrier.inval it first", ull(address));
    }
    check_range(address, 8);
    cell_of_word_[address / 8] = int32_t(cells_.size());
    cells_.push_back(Mbarrier{address, count, count, 0, 0});
    cells_begin_ = std::min(cells_begin_, address);
    cells_end_ = std::max(cells_end_, address + 8);
}

void SharedMemory::inval_mbarrier(uint64_t address) {
    mbarrier(address);
    cell_of_word_[address / 8] = kEndedCell;
    std::memset(at(address), kPoisonByte, 8);
}

Mbarrier& SharedMemory::mbarrier(uint64_t address) {
    if (address % 8 == 0 && address / 8 < cell_of_word_.size() && cell_of_word_[address / 8] >= 0) {
        return cells_[cell_of_word_[address / 8]];
    }
    std::string live;
    for (size_t word = 0; word < cell_of_word_.size(); ++word) {
        if (cell_of_word_[word] < 0) continue;
        char text[24];
        std::snprintf(text, sizeof(text), "%s%#llx", live.empty() ? "" : ", ", ull(word * 8));
        live += text;
    }
    const bool has_ended = address / 8 < cell_of_word_.size() && cell_of_word_[address / 8] == kEndedCell;
    fail(FaultKind::protocol, Rule{has_ended ? "mbarrier-reinitialised" : "race"},
         "no initialised mbarrier at %#llx; live ones: %s", ull(address), live.empty() ? "none" : live.c_str());
}

void TensorMemory::reset() {
    poison(0, kColumns);
    allocations.clear();
    may_allocate = true;
}

void TensorMemory::poison(int64_t first, int64_t num_columns) {
    std::fill(column(first), column(first + num_columns), kPoison);
}

int64_t TensorMemory::allocate(int64_t num_columns) {
    bool legal = num_columns >= 32 && num_columns <= kColumns && (num_columns & (num_columns - 1)) == 0;
    if (!legal) {
        fail(FaultKind::protocol, "tcgen05.alloc of %lld columns; allowed are powers of two from 32 to 512",
             (long long)num_columns);
    }
    if (!may_allocate) {
        fail(FaultKind::protocol, kLifetime, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    }
    for (int64_t first = 0; first < kColumns; first += num_columns) {
        bool is_free = std::all_of(allocations.begin(), allocations.end(), [&](const auto& a) {
            return first + num_columns <= a.first || a.first + a.second <= first;
        });
        if (is_free) {
            allocations[first] = num_columns;
            poison(first, num_columns);
            return first;
        }
    }
    return -1;
}

void TensorMemory::deallocate(int64_t first, int64_t num_columns) {
    auto found = allocations.find(first);
    if (found == allocations.end() || found->second != num_columns) {
        fail(FaultKind::protocol, kLifetime, "tcgen05.dealloc of columns %lld..%lld; live: %s", (long long)first,
             (long long)(first + num_columns - 1), describe().c_str());
    }
    allocations.erase(found);
    poison(first, num_columns);
}

void TensorMemory::check(int64_t first, int64_t num_columns, const char* what) const {
    for (const auto& [start, size] : allocations) {
        if (start <= first && first + num_columns <= start + size) return;
    }
    fail(FaultKind::memory, kLifetime, "%s of TMEM columns %lld..%lld outside live allocations: %s", what,
         (long long)first, (long long)(first + num_columns - 1), describe().c_str());
}

std::string TensorMemory::describe() const {
    std::string text;
    for (const auto& [start, size] : allocations) {
        text += (text.empty() ? "" : ", ") + std::to_string(start) + ".." + std::to_string(start + size - 1);
    }
    return text.empty() ? "none" : text;
}

}  // namespace undertow
