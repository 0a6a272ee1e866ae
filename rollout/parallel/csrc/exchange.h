// Exchanges between the ranks of one host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "posted_number.h"
#include "shared_memory.h"

namespace rollout {

// Every rank makes the same calls in the same order. In each, a rank writes its part to its slot,
// posts the call's number, waits for the others' numbers and copies their parts out of their slots.
//
// Slots alternate between two buffers. A rank writes for call n only when all have posted call
// n - 1, and so have read what it wrote for call n - 2: one wait a call is enough. Larger parts are
// exchanged in several calls.
//
// A wait that fails throws std::runtime_error, which names the rank that did not come.
class Exchange {
 public:
  static constexpr int64_t kSlotBytes = 256 << 10;  // two buffers of a few ranks stay in the cache

  // The first rank creates, the others open what path() of the first one says. No call may be made
  // before all have. `timeout`: seconds that a call waits for the others.
  static Exchange create(int size, double timeout);
  static Exchange open(const std::string& path, int rank, int size, double timeout);

  std::string path() const { return memory_.path(); }

  // Every rank's columns of the same rows, side by side. Bytes, not elements: `ends` of each rank's
  // columns in `out`, whose rows are adjacent; `stride` between the rows of `own`.
  // While it waits it fetches `ahead`, memory that this rank reads next, into the cache.
  void gather_columns(const std::byte* own, int64_t rows, int64_t stride,
                      std::span<const int64_t> ends, std::byte* out,
                      std::span<const std::byte> ahead);
  // Copies rank 0's bytes over the others'. Rank 0 does not wait until they have read them.
  void broadcast(std::byte* data, int64_t bytes);

  // Ranks that have ended, however they did, or left.
  std::vector<int> gone() const;
  // Ends the group for the others as this rank's death would.
  void leave();

 private:
  Exchange(SharedMemory memory, int rank, int size, double timeout);

  struct Rank;

  // This rank's slot for the call, once nobody reads there any more.
  std::byte* free_slot();
  void post();
  // A rank's part of the call, once it has posted it.
  const std::byte* part_of(int rank);
  void await(int rank, uint32_t number);
  // Fetches what is left of ahead_ until the rank has posted the number.
  void fetch_ahead_until(const PostedNumber& posted, uint32_t number);
  [[noreturn]] void give_up(int rank, const std::string& why) const;
  std::byte* slot(int rank) const;

  SharedMemory memory_;
  int rank_;
  int size_;
  double timeout_;
  Rank* ranks_;
  uint32_t call_ = 0;
  std::span<const std::byte> ahead_;  // of the call that is under way
};

}  // namespace rollout
