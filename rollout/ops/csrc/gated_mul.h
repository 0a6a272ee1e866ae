#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

// out[i] = combine(gate[i], up[i]).
template <typename T, typename Combine>
inline void gated_mul_rows(const GatedMulArgs& args, int64_t begin, int64_t end,
                           const Combine& combine) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + row * args.row_stride;
    const T* up = gate + args.width;
    T* out = static_cast<T*>(args.out) + row * args.width;
    for_each_vector(args.width, [&](int64_t i, auto load_at, auto store_at) {
      store_at(out + i, combine(load_at(gate + i), load_at(up + i)));
    });
  }
}

template <typename T>
void gated_mul_rows(const GatedMulArgs& args, int64_t begin, int64_t end) {
  const Vec highest = broadcast(args.limit);
  switch (args.activation) {
    case Activation::kSilu:
      return gated_mul_rows<T>(args, begin, end, [](Vec gate, Vec up) { return silu(gate) * up; });
    case Activation::kGeluTanh:
      return gated_mul_rows<T>(args, begin, end,
                               [](Vec gate, Vec up) { return gelu_tanh(gate) * up; });
    case Activation::kClampedSilu:
      return gated_mul_rows<T>(args, begin, end, [&](Vec gate, Vec up) {
        gate = gate > highest ? highest : gate;
        up = up > highest ? highest : (up < -highest ? -highest : up);
        return gate * sigmoid(args.alpha * gate) * (up + 1.0f);
      });
  }
}

template <typename T>
void soft_cap_rows(const SoftCapArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.x) + row * args.row_stride;
    for_each_vector(args.width, [&](int64_t i, auto load_at, auto store_at) {
      store_at(x + i, args.cap * tanh(load_at(x + i) / args.cap));
    });
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
