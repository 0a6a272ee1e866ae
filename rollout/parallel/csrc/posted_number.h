// A number in shared memory that one process raises and others wait for.
#pragma once

#include <atomic>
#include <cstdint>

namespace rollout {

class PostedNumber {
 public:
  // Raises it, and wakes who sleeps. What was written before is seen by who has found the number.
  void post(uint32_t number);
  // Wakes who sleeps, so that they look at what else may have changed.
  void wake();

  bool has_reached(uint32_t number) const;
  // Looks again for some microseconds, in which other processes may have the core.
  bool soon_reaches(uint32_t number) const;
  // Sleeps until it may have been reached, at most `seconds`; may also return for no reason.
  void sleep_for(uint32_t number, double seconds);

 private:
  // They wrap around; numbers that are compared are never 2^31 apart.
  std::atomic<uint32_t> number_;
  std::atomic<uint32_t> sleepers_;
};

}  // namespace rollout
