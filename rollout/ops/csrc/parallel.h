// Threads borrowed from the OpenMP runtime torch already runs: a second pool beside it would have
// twice as many spinning threads as cores.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rollout {

// Address of GOMP_parallel in torch's OpenMP runtime; 0, as at start, is serial.
void set_gomp_parallel(uintptr_t address);

using ParallelBody = void (*)(const void* context, int64_t item, void* scratch);

// Runs body for every item in [0, items), on up to `threads` threads that each take the next free
// item. scratch: 64-byte aligned, uninitialised, of the running thread.
void parallel_for(int64_t items, int threads, size_t scratch_bytes, ParallelBody body,
                  const void* context);

template <typename Function>  // void(int64_t item, void* scratch)
void parallel_for(int64_t items, int threads, size_t scratch_bytes, const Function& function) {
  parallel_for(
      items, threads, scratch_bytes,
      [](const void* context, int64_t item, void* scratch) {
        (*static_cast<const Function*>(context))(item, scratch);
      },
      &function);
}

}  // namespace rollout
