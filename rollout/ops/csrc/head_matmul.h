// The product of each head's rows with the head's own weight.
//
// Every output is one chain of fused multiply-adds over the inputs, in order, so a row's bits
// depend on that row alone.
#pragma once

#include "attention_blocks.h"
#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
void head_matmul_rows(const HeadMatmulArgs& args, int64_t head, int64_t begin, int64_t end,
                      float* scratch) {
  const int64_t rows = end - begin, stride = round_up(args.outputs, kLanes);
  float* const sums = scratch;
  float* const x = sums + rows * stride;
  float* const widened = x + rows * args.inputs + kLanes;  // weights that end within a vector
  const T* from =
      static_cast<const T*>(args.x) + begin * args.x_row_stride + head * args.x_head_stride;
  for (int64_t row = 0; row < rows; ++row) {
    for_each_vector(args.inputs, [&](int64_t i, auto load_at, auto) {
      store(x + row * args.inputs + i, load_at(from + row * args.x_row_stride + i));
    });
  }
  std::memset(sums, 0, static_cast<size_t>(rows * stride) * sizeof(float));
  const T* weight = static_cast<const T*>(args.weights) + head * args.inputs * args.outputs;
  if (stride == args.outputs) {
    const auto weight_row = [&](int64_t i) { return weight + i * stride; };
    value_rows(x, args.inputs, rows, weight_row, args.inputs, sums, stride);
  } else {
    for (int64_t i = 0; i < args.inputs; ++i) {
      for_each_vector(args.outputs, [&](int64_t o, auto load_at, auto) {
        store(widened + i * stride + o, load_at(weight + i * args.outputs + o));
      });
    }
    const auto weight_row = [&](int64_t i) { return widened + i * stride; };
    value_rows(x, args.inputs, rows, weight_row, args.inputs, sums, stride);
  }
  T* to = static_cast<T*>(args.out) + begin * args.out_row_stride + head * args.out_head_stride;
  for (int64_t row = 0; row < rows; ++row) {
    for_each_vector(args.outputs, [&](int64_t o, auto, auto store_at) {
      store_at(to + row * args.out_row_stride + o, load(sums + row * stride + o));
    });
  }
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
