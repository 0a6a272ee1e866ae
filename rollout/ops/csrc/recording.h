// Calls of ops, kept in order so that they can be made again.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace rollout {

// One thread at a time records into it: the calls that this thread makes of ops. Calls hold
// addresses, so whoever made it keeps the arrays.
class Recording {
 public:
  using Call = std::function<void()>;

  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() { end(); }

  // The recording that this thread's calls go into; null while there is none.
  static Recording*& current() {
    thread_local Recording* recording = nullptr;
    return recording;
  }

  // No further call of this thread goes into it.
  void end() {
    if (current() == this) current() = nullptr;
  }

  void add(Call call) { calls_.push_back(std::move(call)); }

  size_t size() const { return calls_.size(); }

  // Makes calls [first, last) again, on whatever their arrays hold now.
  void replay(size_t first, size_t last) const {
    for (size_t i = first; i < last; ++i) calls_.at(i)();
  }

 private:
  std::vector<Call> calls_;
};

}  // namespace rollout
