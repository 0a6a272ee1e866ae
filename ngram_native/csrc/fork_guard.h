// Keeps a mutex, and what it guards, whole across fork().
#ifndef NGRAM_NATIVE_FORK_GUARD_H_
#define NGRAM_NATIVE_FORK_GUARD_H_

#include <mutex>

namespace ngram {

// While a guard lives, fork() waits until no thread holds its mutex. So the child gets the guarded
// memory between two calls, and a mutex that it can lock. The list of guarded mutexes is global,
// because fork handlers take no arguments and cannot be removed.
class ForkGuard {
 public:
  explicit ForkGuard(std::mutex& mutex);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

 private:
  std::mutex& mutex_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_FORK_GUARD_H_
