#include "posted_number.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace rollout {
namespace {

// On cores of their own ranks come within microseconds of each other. Where they share one, looking
// without yielding keeps the awaited rank from it.
constexpr int kLooks = 50;
constexpr std::chrono::microseconds kYielding{200};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

}  // namespace

void PostedNumber::post(uint32_t number) {
  number_.store(number);  // sequentially consistent: before the look for sleepers
  if (sleepers_.load() != 0) wake();
}

void PostedNumber::wake() { futex(&number_, FUTEX_WAKE, INT_MAX, nullptr); }

bool PostedNumber::has_reached(uint32_t number) const {
  return static_cast<int32_t>(number_.load(std::memory_order_acquire) - number) >= 0;
}

bool PostedNumber::soon_reaches(uint32_t number) const {
  for (int look = 0; look < kLooks; ++look) {
    if (has_reached(number)) return true;
    pause();
  }
  const auto end = std::chrono::steady_clock::now() + kYielding;
  do {
    sched_yield();
    if (has_reached(number)) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void PostedNumber::sleep_for(uint32_t number, double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  sleepers_.fetch_add(1);
  const uint32_t found = number_.load();
  if (static_cast<int32_t>(found - number) < 0) futex(&number_, FUTEX_WAIT, found, &limit);
  sleepers_.fetch_sub(1);
}

}  // namespace rollout
