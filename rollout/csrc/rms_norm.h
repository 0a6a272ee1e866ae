#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

// The lane in which an element is summed depends on its place in the row alone.
template <typename T>
inline void rms_norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  Vec squares{};
  for_each_vector(width, [&](int64_t i, auto load_at, auto) {
    const Vec v = load_at(x + i);
    squares = fma(v, v, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(width);
  const Vec scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for_each_vector(width, [&](int64_t i, auto load_at, auto store_at) {
    const Vec normed = round_to<T>(load_at(x + i) * scale);
    store_at(out + i, normed * load_at(weight + i));
  });
}

template <typename T>
void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row / args.heads * args.x_row_stride +
                 row % args.heads * args.x_head_stride;
    T* out = static_cast<T*>(args.out) + row * args.width;
    if (args.residual != nullptr) {
      T* residual = static_cast<T*>(args.residual) + row * args.residual_row_stride;
      for_each_vector(args.width, [&](int64_t i, auto load_at, auto store_at) {
        store_at(residual + i, load_at(residual + i) + load_at(x + i));
      });
      x = residual;
    }
    rms_norm_row(x, weight, out, args.width, args.eps);
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
