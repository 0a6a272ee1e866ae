// The gated delta rule of one entry and value head, for a block of the values' columns.
//
// Exactness. A column of the state never meets another: what it recalls and what is read out of it
// are one chain of multiply-adds each over the key's dimensions, whichever columns are beside it. A
// state is float32 wherever it lies, so a row sees the same bits in the block the row before it has
// left in cache as in a slot.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
class DeltaRuleBlock {
 public:
  DeltaRuleBlock(const DeltaRuleArgs& args, int64_t entry, int64_t head, int64_t first_column,
                 float* scratch)
      : args_(args),
        entry_(entry),
        head_(head),
        first_(first_column),
        count_(args.value_dim - first_column < kStateColumns ? args.value_dim - first_column
                                                             : kStateColumns),
        own_{scratch, kStateColumns},
        q_(scratch + args.key_dim * kStateColumns),
        k_(q_ + args.key_dim) {}

  void run() {
    const StatePlan& plan = args_.plan;
    State last{};
    for (int64_t row = plan.q_offsets[entry_]; row < plan.q_offsets[entry_ + 1]; ++row) {
      const int64_t parent = plan.parents[row];
      const State before = parent < 0          ? slot(plan.sources[entry_])
                           : parent == row - 1 ? last
                                               : slot(plan.targets[parent]);
      last = plan.targets[row] != kNoState ? slot(plan.targets[row]) : own_;
      step(row, before, last);
    }
  }

 private:
  // The block's columns of a state: key dimension i is at data + i * stride.
  struct State {
    float* data;
    int64_t stride;
  };

  State slot(int64_t index) const {
    if (index == kNoState) {
      std::memset(own_.data, 0, static_cast<size_t>(args_.key_dim * own_.stride) * sizeof(float));
      return own_;
    }
    return {
        args_.states + index * args_.slot_stride + head_ * args_.key_dim * args_.value_dim + first_,
        args_.value_dim};
  }

  // `after` is `before` itself, or apart from it.
  void step(int64_t row, State before, State after) {
    const int64_t key_head = head_ / (args_.heads / args_.key_heads);
    load_unit(
        static_cast<const T*>(args_.q) + row * args_.q_row_stride + key_head * args_.q_head_stride,
        1.0f / __builtin_sqrtf(static_cast<float>(args_.key_dim)), q_);
    load_unit(
        static_cast<const T*>(args_.k) + row * args_.k_row_stride + key_head * args_.k_head_stride,
        1.0f, k_);
    const T* v = static_cast<const T*>(args_.v) + row * args_.v_row_stride +
                 head_ * args_.v_head_stride + first_;
    T* out = static_cast<T*>(args_.out) + (row * args_.heads + head_) * args_.value_dim + first_;
    decay_ = exp(broadcast(args_.log_decay[row * args_.log_decay_row_stride + head_]));
    beta_ = broadcast(args_.beta[row * args_.beta_row_stride + head_]);
    int64_t i = 0;
    for (; i + kVecs * kLanes <= count_; i += kVecs * kLanes) {
      update<kVecs>(
          v + i, before.data + i, before.stride, after.data + i, after.stride, out + i,
          [](const auto* p) { return load(p); }, [](auto* p, Vec x) { store(p, x); });
    }
    for_each_vector(count_ - i, [&](int64_t j, auto load_at, auto store_at) {
      update<1>(v + i + j, before.data + i + j, before.stride, after.data + i + j, after.stride,
                out + i + j, load_at, store_at);
    });
  }

  // to = scale * x / sqrt(x.x + 1e-6)
  void load_unit(const T* x, float scale, float* to) const {
    Vec squares{};
    for_each_vector(args_.key_dim, [&](int64_t i, auto load_at, auto) {
      const Vec element = load_at(x + i);
      squares = fma(element, element, squares);
    });
    const Vec factor = broadcast(scale / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
    for_each_vector(args_.key_dim, [&](int64_t i, auto load_at, auto store_at) {
      store_at(to + i, load_at(x + i) * factor);
    });
  }

  template <int Vecs, typename Load, typename Store>
  void update(const T* v, const float* before, int64_t before_stride, float* after,
              int64_t after_stride, T* out, const Load& load_at, const Store& store_at) const {
    const int64_t key_dim = args_.key_dim;
    const float* const keys = k_;
    const float* const queries = q_;
    const Vec decay = decay_;
    Vec recalled[Vecs] = {}, delta[Vecs], sums[Vecs] = {};
    for (int64_t i = 0; i < key_dim; ++i) {
      const Vec k = broadcast(keys[i]);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) {
        recalled[j] = fma(k, load_at(before + i * before_stride + j * kLanes), recalled[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      delta[j] = (load_at(v + j * kLanes) - recalled[j] * decay) * beta_;
    }
    for (int64_t i = 0; i < key_dim; ++i) {
      const Vec k = broadcast(keys[i]), q = broadcast(queries[i]);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) {
        const Vec decayed = load_at(before + i * before_stride + j * kLanes) * decay;
        const Vec state = fma(k, delta[j], decayed);
        store_at(after + i * after_stride + j * kLanes, state);
        sums[j] = fma(q, state, sums[j]);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) store_at(out + j * kLanes, sums[j]);
  }

  static constexpr int kVecs = 4;

  const DeltaRuleArgs& args_;
  const int64_t entry_, head_, first_, count_;
  const State own_;  // for rows without a target
  float* const q_;
  float* const k_;
  Vec decay_{}, beta_{};  // of the row
};

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
