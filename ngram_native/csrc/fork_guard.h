// Keeps a mutex, and what it guards, whole across fork().
#ifndef NGRAM_NATIVE_FORK_GUARD_H_
#define NGRAM_NATIVE_FORK_GUARD_H_

#include <mutex>

namespace ngram {

// While one lives, fork() waits until no thread is inside the mutex, so that the child gets its
// memory between two calls and a mutex it can lock. The list of guarded mutexes is the process's:
// fork handlers cannot be handed anything else, nor be taken back.
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
