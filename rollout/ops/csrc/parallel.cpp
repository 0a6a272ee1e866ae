#include "parallel.h"

#include <atomic>
#include <memory>
#include <new>

namespace rollout {
namespace {

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<GompParallel> gomp_parallel{nullptr};

struct AlignedDelete {
  void operator()(std::byte* pointer) const { ::operator delete(pointer, std::align_val_t{64}); }
};

// Reused between calls: mapping and faulting fresh pages would cost more than small ops themselves.
class Scratch {
 public:
  void* reserve(size_t bytes) {
    if (bytes > capacity_) {
      data_.reset();
      capacity_ = 0;
      data_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
      capacity_ = bytes;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<std::byte, AlignedDelete> data_;
  size_t capacity_ = 0;
};

struct Region {
  ParallelBody body;
  const void* context;
  int64_t items;
  size_t scratch_bytes;
  std::atomic<int64_t> next{0};

  void run() {
    thread_local Scratch thread_scratch;
    void* scratch = scratch_bytes ? thread_scratch.reserve(scratch_bytes) : nullptr;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      body(context, item, scratch);
    }
  }
};

}  // namespace

void set_gomp_parallel(uintptr_t address) {
  gomp_parallel.store(reinterpret_cast<GompParallel>(address));
}

void parallel_for(int64_t items, int threads, size_t scratch_bytes, ParallelBody body,
                  const void* context) {
  Region region{body, context, items, scratch_bytes};
  const GompParallel fork = gomp_parallel.load(std::memory_order_relaxed);
  if (threads > 1 && items > 1 && fork != nullptr) {
    // Always the whole team: a change of team size makes the runtime end and start threads.
    fork([](void* data) { static_cast<Region*>(data)->run(); }, &region,
         static_cast<unsigned>(threads), 0);
  } else {
    region.run();
  }
}

}  // namespace rollout
