#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace rollout {

namespace generic {
extern const Kernels kKernels;
}
#ifdef ROLLOUT_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Choice {
  const Kernels& kernels;
  bool runs_here;
};

const Kernels& choose() {
  // Best first. x86-64-v4 and v3, by the features the kernels were compiled for.
  const Choice choices[] = {
#ifdef ROLLOUT_X86
      {avx512::kKernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512cd")},
      {avx2::kKernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")},
#endif
      {generic::kKernels, true},
  };
  // Instruction sets differ in the last bits. Naming one makes unlike processors agree.
  const char* wanted = std::getenv("ROLLOUT_CPU_ISA");
  for (const Choice& choice : choices) {
    const bool named = wanted == nullptr || std::strcmp(wanted, choice.kernels.name) == 0;
    if (named && choice.runs_here) return choice.kernels;
  }
  throw std::invalid_argument(std::string("ROLLOUT_CPU_ISA=") + wanted +
                              ": must be avx512, avx2 or generic, and this processor must run it");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

bool has_panel_matmul() {
#ifdef ROLLOUT_X86
  // With AMX a library multiplies more rows in less time, and adds up in another order.
  return kernels().panel_matmul != nullptr && __builtin_cpu_supports("avx512bf16") &&
         !__builtin_cpu_supports("amx-bf16");
#else
  return false;
#endif
}

}  // namespace rollout
