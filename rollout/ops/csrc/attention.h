// Attention of one tile of query rows over one kv head.
#pragma once

#include "attention_blocks.h"
#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
class TileAttention {
 public:
  TileAttention(const AttentionArgs& args, const AttentionTile& tile, int64_t kv_head,
                float* scratch)
      : args_(args),
        tile_(tile),
        kv_head_(kv_head),
        group_(args.group),
        row_heads_(tile.rows * args.group),
        dim_stride_(round_up(args.head_dim, kLanes)),
        value_stride_(round_up(args.value_dim, kLanes)),
        score_stride_(round_up(tile.shared_len + tile.tail_len, kKeyBlock) + 16),
        block_(scratch),
        q_(block_ + kMaxTailKeys * dim_stride_),
        out_(q_ + row_heads_ * dim_stride_),
        scores_(out_ + row_heads_ * value_stride_),
        tail_scores_(scores_ + row_heads_ * score_stride_),
        inverse_sums_(tail_scores_ + row_heads_ * kMaxTailKeys) {
    static_assert(kMaxTailKeys % kKeyBlock == 0 && kValueBlock <= kMaxTailKeys);
    begin_ = joint_ = shared_start(0);
    for (int64_t row = 1; row < tile_.rows; ++row) {
      const int64_t start = shared_start(row);
      if (start < begin_) begin_ = start;
      if (start > joint_) joint_ = start;
    }
    first_block_ = begin_ / kKeyBlock * kKeyBlock;
  }

  void run() {
    load_queries();
    score(tile_.shared_slots, first_block_, tile_.shared_len, scores_, score_stride_);
    score(tile_.tail_slots, 0, tile_.tail_len, tail_scores_, kMaxTailKeys);
    exponentiate_scores();
    clear(out_, row_heads_);
    if (begin_ < joint_) sum_values_of_some_rows();
    sum_shared_values();
    if (tile_.tail_len > 0) sum_tail_values();
    store_out();
  }

 private:
  static constexpr int64_t kValueBlock = 32;

  // The first position that a row sees.
  int64_t start_of(int64_t row) const {
    const int64_t start =
        tile_.shared_len + __builtin_popcountll(tile_.tail_masks[row]) - args_.window;
    return start > 0 ? start : 0;
  }

  // The first of the shared keys that a row sees; shared_len if it sees none.
  int64_t shared_start(int64_t row) const {
    const int64_t start = start_of(row);
    return start < tile_.shared_len ? start : tile_.shared_len;
  }

  void clear(float* rows, int64_t count) const {
    std::memset(rows, 0, static_cast<size_t>(count * value_stride_) * sizeof(float));
  }

  PoolRows<T> key_rows(const int32_t* slots, int64_t count) const {
    const T* pool = static_cast<const T*>(args_.k_pool) + kv_head_ * args_.k_head_stride;
    return {pool, args_.k_slot_stride, slots, count, args_.head_dim};
  }

  PoolRows<T> value_rows_of(const int32_t* slots, int64_t count) const {
    const T* pool = static_cast<const T*>(args_.v_pool) + kv_head_ * args_.v_head_stride;
    return {pool, args_.v_slot_stride, slots, count, args_.value_dim};
  }

  void load_queries() {
    const T* rows = static_cast<const T*>(args_.q) + tile_.first_row * args_.q_row_stride +
                    kv_head_ * group_ * args_.q_head_stride;
    for (int64_t m = 0; m < row_heads_; ++m) {
      const T* from = rows + m / group_ * args_.q_row_stride + m % group_ * args_.q_head_stride;
      float* to = q_ + m * dim_stride_;
      for_each_vector(args_.head_dim,
                      [&](int64_t d, auto load_at, auto) { store(to + d, load_at(from + d)); });
    }
  }

  void score(const int32_t* slots, int64_t begin, int64_t count, float* to, int64_t stride) {
    const PoolRows<T> rows = key_rows(slots, count);
    for (int64_t first = begin; first < count; first += kKeyBlock) {
      load_keys(rows, first, block_);
      score_rows(q_, dim_stride_, row_heads_, block_, count - first, args_.head_dim, args_.scale,
                 to + first, stride);
    }
  }

  void exponentiate_scores() {
    for (int64_t m = 0; m < row_heads_; ++m) {
      float* row = scores_ + m * score_stride_;
      const float* tail = tail_scores_ + m * kMaxTailKeys;
      int64_t len = tile_.shared_len;
      for (uint64_t mask = tile_.tail_masks[m / group_]; mask != 0; mask &= mask - 1) {
        row[len++] = tail[__builtin_ctzll(mask)];
      }
      // Whole blocks are left out, so that a position's lane stays the same.
      if (args_.soft_cap > 0) cap_scores(row + first_block_, len - first_block_, args_.soft_cap);
      const int64_t start = start_of(m / group_);
      for (int64_t i = first_block_; i < start; ++i) row[i] = -__builtin_inff();
      const float sink =
          args_.sinks == nullptr ? -__builtin_inff() : args_.sinks[kv_head_ * group_ + m % group_];
      inverse_sums_[m] = exponentiate(row + first_block_, len - first_block_, sink);
    }
  }

  // Windows begin at different positions: before `joint_`, each row has keys of its own.
  void sum_values_of_some_rows() {
    clear(block_, kMaxTailKeys);
    load_values(value_rows_of(tile_.shared_slots, tile_.shared_len), begin_, joint_ - begin_,
                block_, value_stride_);
    for (int64_t row = 0; row < tile_.rows; ++row) {
      const int64_t start = shared_start(row);
      const auto value = [&](int64_t key) {
        return block_ + (start - begin_ + key) * value_stride_;
      };
      value_rows(scores_ + row * group_ * score_stride_ + start, score_stride_, group_, value,
                 joint_ - start, out_ + row * group_ * value_stride_, value_stride_);
    }
  }

  void sum_shared_values() {
    const PoolRows<T> rows = value_rows_of(tile_.shared_slots, tile_.shared_len);
    if (row_heads_ <= kBlockRows && value_stride_ == args_.value_dim) {
      // One register block uses each value once, so it is widened on the way.
      const auto value = [&](int64_t key) {
        rows.prefetch(joint_ + key + kPrefetchRows);
        return rows.row(joint_ + key);
      };
      value_rows(scores_ + joint_, score_stride_, row_heads_, value, rows.count - joint_, out_,
                 value_stride_);
      return;
    }
    clear(block_, kMaxTailKeys);
    const auto value = [&](int64_t key) { return block_ + key * value_stride_; };
    for (int64_t first = joint_; first < rows.count; first += kValueBlock) {
      const int64_t left = rows.count - first;
      const int64_t count = left < kValueBlock ? left : kValueBlock;
      load_values(rows, first, count, block_, value_stride_);
      value_rows(scores_ + first, score_stride_, row_heads_, value, count, out_, value_stride_);
    }
  }

  void sum_tail_values() {
    clear(block_, kMaxTailKeys);
    load_values(value_rows_of(tile_.tail_slots, tile_.tail_len), 0, tile_.tail_len, block_,
                value_stride_);
    for (int64_t row = 0; row < tile_.rows; ++row) {
      const float* probs = scores_ + row * group_ * score_stride_ + tile_.shared_len;
      int64_t position = tile_.shared_len;
      for (uint64_t mask = tile_.tail_masks[row]; mask != 0; mask &= mask - 1, ++probs) {
        if (position++ < start_of(row)) continue;
        const float* values_of_key = block_ + __builtin_ctzll(mask) * value_stride_;
        const auto value = [&](int64_t) { return values_of_key; };
        value_rows(probs, score_stride_, group_, value, 1, out_ + row * group_ * value_stride_,
                   value_stride_);
      }
    }
  }

  void store_out() const {
    for (int64_t m = 0; m < row_heads_; ++m) {
      const int64_t row = tile_.first_row + m / group_;
      const int64_t head = kv_head_ * group_ + m % group_;
      T* to = static_cast<T*>(args_.out) + (row * args_.kv_heads * group_ + head) * args_.value_dim;
      const float* from = out_ + m * value_stride_;
      const Vec inverse_sum = broadcast(inverse_sums_[m]);
      for_each_vector(args_.value_dim, [&](int64_t d, auto, auto store_at) {
        // Adding zero turns -0 into +0, the one trace a key of weight zero could leave.
        store_at(to + d, load(from + d) * inverse_sum + 0.0f);
      });
    }
  }

  const AttentionArgs& args_;
  const AttentionTile& tile_;
  const int64_t kv_head_, group_;
  const int64_t row_heads_;  // query heads of the tile's rows, those of a row adjacent
  const int64_t dim_stride_, value_stride_, score_stride_;
  float* const block_;  // a block of keys, transposed; then of values
  float* const q_;
  float* const out_;
  float* const scores_;  // by position; then their exponentials
  float* const tail_scores_;
  float* const inverse_sums_;
  int64_t begin_;        // the first shared key that any row sees
  int64_t joint_;        // the first one that all rows see
  int64_t first_block_;  // the block of `begin_`
};

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
