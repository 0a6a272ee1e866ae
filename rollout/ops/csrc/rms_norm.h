#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

// out[i] = weigh(i, normed, load). The lane in which an element is summed depends only on
// its index in the row.
template <typename T, typename Weigh>
inline void rms_norm_row(const T* x, T* out, int64_t width, float eps, const Weigh& weigh) {
  Vec squares{};
  for_each_vector(width, [&](int64_t i, auto load_at, auto) {
    const Vec v = load_at(x + i);
    squares = fma(v, v, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(width);
  const Vec scale = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for_each_vector(width, [&](int64_t i, auto load_at, auto store_at) {
    store_at(out + i, weigh(i, load_at(x + i) * scale, load_at));
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
    const auto scaled = [&](int64_t i, Vec normed, auto load_at) {
      return round_to<T>(normed) * load_at(weight + i);
    };
    if (args.unit_offset) {
      rms_norm_row(x, out, args.width, args.eps, [&](int64_t i, Vec normed, auto load_at) {
        return normed * (load_at(weight + i) + 1.0f);
      });
    } else if (args.gate != nullptr) {
      const T* gate = static_cast<const T*>(args.gate) + row / args.heads * args.gate_row_stride +
                      row % args.heads * args.gate_head_stride;
      rms_norm_row(x, out, args.width, args.eps, [&](int64_t i, Vec normed, auto load_at) {
        return round_to<T>(scaled(i, normed, load_at)) * silu(load_at(gate + i));
      });
    } else {
      rms_norm_row(x, out, args.width, args.eps, scaled);
    }
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
