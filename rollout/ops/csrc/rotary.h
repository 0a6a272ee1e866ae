#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
inline void rotate_heads(T* row, int64_t heads, int64_t head_stride, const float* cosines,
                         int64_t half) {
  const float* sines = cosines + half;
  for (int64_t head = 0; head < heads; ++head) {
    T* first = row + head * head_stride;
    T* second = first + half;
    for_each_vector(half, [&](int64_t i, auto load_at, auto store_at) {
      const Vec a = load_at(first + i), b = load_at(second + i);
      const Vec cosine = load_at(cosines + i), sine = load_at(sines + i);
      store_at(first + i, a * cosine - b * sine);
      store_at(second + i, b * cosine + a * sine);
    });
  }
}

template <typename T>
void rotary_rows(const RotaryArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* cosines = args.cos_sin + args.positions[row] * 2 * args.half;
    rotate_heads(static_cast<T*>(args.q) + row * args.q_row_stride, args.q_heads,
                 args.q_head_stride, cosines, args.half);
    rotate_heads(static_cast<T*>(args.k) + row * args.k_row_stride, args.k_heads,
                 args.k_head_stride, cosines, args.half);
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
