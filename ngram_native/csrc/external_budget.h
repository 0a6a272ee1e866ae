// Limits the memory that the external corpora of one corpus take together.
#ifndef NGRAM_NATIVE_EXTERNAL_BUDGET_H_
#define NGRAM_NATIVE_EXTERNAL_BUDGET_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "validation.h"

namespace ngram {

// Shared by all external corpora of one Corpus, whether published, built or being built. Any thread
// may use it.
class ExternalBudget {
 public:
  explicit ExternalBudget(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Throws std::invalid_argument where the bytes do not fit.
  void take(std::uint64_t bytes) {
    std::uint64_t used = used_.load();
    do {
      if (bytes > max_bytes_ - std::min(used, max_bytes_)) {
        refuse("documents", std::to_string(bytes) + " bytes more",
               "do not fit beside the " + std::to_string(used) +
                   " bytes of external corpora held, within max_external_bytes=" +
                   std::to_string(max_bytes_) + "; raise it or remove one");
      }
    } while (!used_.compare_exchange_weak(used, used + bytes));
  }
  void take_unbounded(std::uint64_t bytes) { used_ += bytes; }
  void give_back(std::uint64_t bytes) { used_ -= bytes; }

  std::uint64_t max_bytes() const { return max_bytes_; }
  std::uint64_t used() const { return used_; }

 private:
  const std::uint64_t max_bytes_;
  std::atomic<std::uint64_t> used_ = 0;
};

// The part of a budget that one external corpus takes, given back by the destructor.
class Charge {
 public:
  Charge() = default;
  explicit Charge(std::shared_ptr<ExternalBudget> budget) : budget_(std::move(budget)) {}
  ~Charge() {
    if (budget_) budget_->give_back(bytes_);
  }
  Charge(Charge&& other) noexcept { *this = std::move(other); }
  Charge& operator=(Charge&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void resize(std::uint64_t bytes) {
    if (!budget_) return;
    if (bytes <= bytes_) {
      budget_->give_back(bytes_ - bytes);
    } else {
      budget_->take(bytes - bytes_);
    }
    bytes_ = bytes;
  }

  // Moves the bytes to another budget, even beyond its limit.
  void move_to(std::shared_ptr<ExternalBudget> budget) {
    budget->take_unbounded(bytes_);
    if (budget_) budget_->give_back(bytes_);
    budget_ = std::move(budget);
  }

  std::uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<ExternalBudget> budget_;
  std::uint64_t bytes_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_EXTERNAL_BUDGET_H_
