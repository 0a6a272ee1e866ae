#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
void sigmoid_gate_rows(const SigmoidGateArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.x) + row / args.heads * args.x_row_stride +
           row % args.heads * args.x_head_stride;
    const T* gate = static_cast<const T*>(args.gate) + row / args.heads * args.gate_row_stride +
                    row % args.heads * args.gate_head_stride;
    for_each_vector(args.width, [&](int64_t i, auto load_at, auto store_at) {
      store_at(x + i, load_at(x + i) * sigmoid(load_at(gate + i)));
    });
  }
}

template <typename T>
void delta_gates_rows(const DeltaGatesArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* a = static_cast<const T*>(args.a) + row * args.a_row_stride;
    const T* b = static_cast<const T*>(args.b) + row * args.b_row_stride;
    float* log_decay = args.log_decay + row * args.heads;
    float* beta = args.beta + row * args.heads;
    for_each_vector(args.heads, [&](int64_t i, auto load_at, auto store_at) {
      const Vec step = softplus(load_at(a + i) + load_at(args.dt_bias + i));
      store_at(log_decay + i, -exp(load_at(args.A_log + i)) * step);
      store_at(beta + i, sigmoid(load_at(b + i)));
    });
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
