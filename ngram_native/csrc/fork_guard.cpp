#include "fork_guard.h"

#include <pthread.h>

#include <set>

namespace ngram {

namespace {

struct Guarded {
  std::mutex mutex;  // of the set; locked before any of its members
  std::set<std::mutex*> members;
};

void lock_all();
void unlock_all();

Guarded& guarded() {
  // Never destroyed: a fork may come while the process ends.
  static Guarded* const instance = [] {
    ::pthread_atfork(lock_all, unlock_all, unlock_all);
    return new Guarded;
  }();
  return *instance;
}

void lock_all() {
  guarded().mutex.lock();
  for (std::mutex* member : guarded().members) member->lock();
}

void unlock_all() {
  for (std::mutex* member : guarded().members) member->unlock();
  guarded().mutex.unlock();
}

}  // namespace

ForkGuard::ForkGuard(std::mutex& mutex) : mutex_(mutex) {
  const std::scoped_lock lock(guarded().mutex);
  guarded().members.insert(&mutex_);
}

ForkGuard::~ForkGuard() {
  const std::scoped_lock lock(guarded().mutex);
  guarded().members.erase(&mutex_);
}

}  // namespace ngram
