#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

struct InstructionSet {
  const char* name;
  const Kernels& kernels;
  bool has_tiles;
  bool runs_here;
};

#ifdef ROLLOUT_X86
bool has_avx512() {  // x86-64-v4
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd");
}

bool has_avx2() {  // x86-64-v3
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

// Linux gives a process the tiles' registers when it asks for them: see arch_prctl(2).
bool has_amx() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return avx512::kKernels.tile_matmul != nullptr && has_avx512() &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

InstructionSet choose() {
  // Best first, by the features that the kernels were compiled for.
  const InstructionSet sets[] = {
#ifdef ROLLOUT_X86
      {"amx", avx512::kKernels, true, has_amx()},
      {"avx512", avx512::kKernels, false, has_avx512()},
      {"avx2", avx2::kKernels, false, has_avx2()},
#endif
      {"generic", generic::kKernels, false, true},
  };
  // Instruction sets differ in the last bits. Naming one makes unlike processors agree.
  const char* wanted = std::getenv("ROLLOUT_CPU_ISA");
  for (const InstructionSet& set : sets) {
    const bool named = wanted == nullptr || std::strcmp(wanted, set.name) == 0;
    if (named && set.runs_here) return set;
  }
  throw std::invalid_argument(
      std::string("ROLLOUT_CPU_ISA=") + wanted +
      ": must be amx, avx512, avx2 or generic, and this processor must run it");
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

const Kernels& kernels() { return chosen().kernels; }
const char* instruction_set() { return chosen().name; }
bool has_tile_matmul() { return chosen().has_tiles; }

bool has_panel_matmul() {
#ifdef ROLLOUT_X86
  return kernels().panel_matmul != nullptr && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace rollout
