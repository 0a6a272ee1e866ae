#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
void silu_mul_rows(const SiluMulArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + row * args.row_stride;
    const T* up = gate + args.width;
    T* out = static_cast<T*>(args.out) + row * args.width;
    for_each_vector(args.width, [&](int64_t i, auto load_at, auto store_at) {
      store_at(out + i, silu(load_at(gate + i)) * load_at(up + i));
    });
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
