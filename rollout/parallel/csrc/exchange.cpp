#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace rollout {
namespace {

constexpr double kLookSeconds = 0.1;  // between two looks whether an awaited rank lives

// Of memory that is fetched ahead. More would not stay in a core's own cache until it is read.
constexpr size_t kAheadBytes = 512 << 10;
constexpr size_t kLineBytes = 64;
constexpr size_t kLinesAtOnce = 4;  // between two looks at an awaited number

struct Rows {
  std::byte* data;
  int64_t stride;
};

void copy_rows(Rows out, const std::byte* from, int64_t stride, int64_t rows, int64_t width) {
  if (width <= 0) return;
  if (rows == 1 || (stride == width && out.stride == width)) {
    std::memcpy(out.data, from, static_cast<size_t>(rows * width));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out.data + row * out.stride, from + row * stride, static_cast<size_t>(width));
  }
}

size_t memory_bytes(int size, size_t rank_bytes) {
  return static_cast<size_t>(size) * (rank_bytes + 2 * Exchange::kSlotBytes);
}

}  // namespace

// A cache line of its own, and the neighbour that is fetched with it.
struct alignas(128) Exchange::Rank {
  PostedNumber posted;
};

Exchange Exchange::create(int size, double timeout) {
  return {SharedMemory::create(memory_bytes(size, sizeof(Rank))), 0, size, timeout};
}

Exchange Exchange::open(const std::string& path, int rank, int size, double timeout) {
  return {SharedMemory::open(path, memory_bytes(size, sizeof(Rank))), rank, size, timeout};
}

Exchange::Exchange(SharedMemory memory, int rank, int size, double timeout)
    : memory_(std::move(memory)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      ranks_(reinterpret_cast<Rank*>(memory_.data())) {
  memory_.lock(rank);
}

void Exchange::gather_columns(const std::byte* own, int64_t rows, int64_t stride,
                              std::span<const int64_t> ends, std::byte* out,
                              std::span<const std::byte> ahead) {
  ahead_ = ahead.first(std::min(ahead.size(), kAheadBytes));
  const int64_t out_stride = ends.back();
  const auto start = [&](int rank) { return rank == 0 ? 0 : ends[rank - 1]; };
  int64_t widest = 0;
  for (int rank = 0; rank < size_; ++rank) widest = std::max(widest, ends[rank] - start(rank));
  if (rows == 0 || widest == 0) return;
  const int64_t columns = std::min(widest, kSlotBytes);
  const int64_t block = kSlotBytes / columns;

  for (int64_t row = 0; row < rows; row += block) {
    const int64_t height = std::min(block, rows - row);
    for (int64_t column = 0; column < widest; column += columns) {
      const auto width = [&](int rank) {
        return std::min(columns, ends[rank] - start(rank) - column);
      };
      const auto place = [&](int rank) {
        return Rows{out + row * out_stride + start(rank) + column, out_stride};
      };
      const std::byte* own_part = own + row * stride + column;
      ++call_;
      copy_rows({free_slot(), width(rank_)}, own_part, stride, height, width(rank_));
      post();
      copy_rows(place(rank_), own_part, stride, height, width(rank_));
      for (int step = 1; step < size_; ++step) {
        const int rank = (rank_ + step) % size_;
        copy_rows(place(rank), part_of(rank), width(rank), height, width(rank));
      }
    }
  }
  ahead_ = {};
}

void Exchange::broadcast(std::byte* data, int64_t bytes) {
  for (int64_t first = 0; first < bytes; first += kSlotBytes) {
    const auto count = static_cast<size_t>(std::min(kSlotBytes, bytes - first));
    ++call_;
    if (rank_ == 0) {
      std::memcpy(free_slot(), data + first, count);
      post();
    } else {
      post();
      std::memcpy(data + first, part_of(0), count);
    }
  }
}

std::vector<int> Exchange::gone() const {
  std::vector<int> found;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !memory_.is_locked(rank)) found.push_back(rank);
  }
  return found;
}

void Exchange::leave() {
  memory_.unlock(rank_);
  ranks_[rank_].posted.wake();
}

std::byte* Exchange::free_slot() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) await(rank, call_ - 1);
  }
  return slot(rank_);
}

void Exchange::post() { ranks_[rank_].posted.post(call_); }

const std::byte* Exchange::part_of(int rank) {
  await(rank, call_);
  return slot(rank);
}

void Exchange::await(int rank, uint32_t number) {
  PostedNumber& posted = ranks_[rank].posted;
  if (posted.has_reached(number)) return;
  fetch_ahead_until(posted, number);
  if (posted.soon_reaches(number)) return;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  while (!posted.has_reached(number)) {
    if (!memory_.is_locked(rank) && !posted.has_reached(number)) {  // it may have posted, and ended
      give_up(rank, "has ended or left");
    }
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited >= timeout_) {
      char text[64];
      std::snprintf(text, sizeof text, "did not come in %g seconds", timeout_);
      give_up(rank, text);
    }
    posted.sleep_for(number, std::min(kLookSeconds, timeout_ - waited));
  }
}

void Exchange::fetch_ahead_until(const PostedNumber& posted, uint32_t number) {
  constexpr size_t kStep = kLinesAtOnce * kLineBytes;
  while (ahead_.size() >= kStep && !posted.has_reached(number)) {
    for (size_t line = 0; line < kLinesAtOnce; ++line) {
      __builtin_prefetch(ahead_.data() + line * kLineBytes, 0, 2);
    }
    ahead_ = ahead_.subspan(kStep);
  }
}

void Exchange::give_up(int rank, const std::string& why) const {
  throw std::runtime_error("rank " + std::to_string(rank) + " " + why);
}

std::byte* Exchange::slot(int rank) const {
  const int64_t index = static_cast<int64_t>(call_ & 1) * size_ + rank;
  return memory_.data() + static_cast<size_t>(size_) * sizeof(Rank) + index * kSlotBytes;
}

}  // namespace rollout
