// Progress and memory of an index under construction, and its cancellation.
#ifndef NGRAM_NATIVE_BUILD_MONITOR_H_
#define NGRAM_NATIVE_BUILD_MONITOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "external_budget.h"

namespace ngram {

// Thrown by a build that was cancelled.
struct BuildCancelled {};

// One thread builds. Any thread may cancel, and read the counters.
class BuildMonitor {
 public:
  // Work between two checkpoints, in tokens: well below a millisecond.
  static constexpr std::uint32_t kStride = 1 << 14;

  explicit BuildMonitor(std::shared_ptr<ExternalBudget> budget) : charge_(std::move(budget)) {}

  // Declares how many bytes the build holds: before more are allocated, and after some are freed.
  void hold(std::uint64_t bytes) {
    charge_.resize(bytes);
    num_bytes_ = bytes;
  }

  void checkpoint() {
    if (cancelled_.load(std::memory_order_relaxed)) throw BuildCancelled();
    if (!proceed_) return;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_question_) return;
    next_question_ = now + kBetweenQuestions;
    if (!proceed_()) throw BuildCancelled();
  }
  void set_indexed(std::uint64_t positions) {
    indexed_.store(positions, std::memory_order_relaxed);
    checkpoint();
  }

  // The building thread calls `proceed` ten times a second; false cancels the build.
  void ask(std::function<bool()> proceed) { proceed_ = std::move(proceed); }

  void cancel() { cancelled_ = true; }
  std::uint64_t indexed() const { return indexed_; }  // positions sorted so far
  std::uint64_t num_bytes() const { return num_bytes_; }
  Charge take_charge() { return std::move(charge_); }

 private:
  static constexpr std::chrono::milliseconds kBetweenQuestions{100};

  Charge charge_;
  std::function<bool()> proceed_;
  std::chrono::steady_clock::time_point next_question_{};
  std::atomic<bool> cancelled_ = false;
  std::atomic<std::uint64_t> indexed_ = 0;
  std::atomic<std::uint64_t> num_bytes_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_BUILD_MONITOR_H_
