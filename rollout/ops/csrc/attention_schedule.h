// A step's attention, checked and cut into tiles, once for all layers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels.h"

namespace rollout {

// The arrays of rollout.ops.paged_attention.AttentionPlan; they outlive the schedule.
struct PlanArrays {
  const int32_t* req_to_token;
  int64_t table_rows, max_context, table_row_stride;
  std::span<const int32_t> rows;          // [B]
  std::span<const int32_t> q_offsets;     // [B + 1]
  std::span<const int32_t> starts;        // [B]
  std::span<const int32_t> run_lens;      // [B]
  std::span<const int32_t> node_offsets;  // [B + 1]
  std::span<const int64_t> node_masks;    // [N]
  std::span<const int32_t> node_slots;    // [N]
};

// The sizes a schedule is made for.
struct AttentionSizes {
  int64_t query_rows, heads, kv_heads, slots;

  bool operator==(const AttentionSizes&) const = default;
};

class AttentionSchedule {
 public:
  // Throws std::invalid_argument when the plan contradicts itself or the sizes.
  AttentionSchedule(const PlanArrays& plan, const AttentionSizes& sizes);

  const std::vector<AttentionTile>& tiles() const { return tiles_; }
  const AttentionSizes& sizes() const { return sizes_; }
  int64_t covered_rows() const { return covered_rows_; }  // the others are padding
  int64_t max_tile_rows() const { return max_tile_rows_; }
  int64_t max_len() const { return max_len_; }    // most keys one row sees
  int64_t row_keys() const { return row_keys_; }  // sum over rows of the keys they see, about

 private:
  void add_entry(const PlanArrays& plan, int64_t entry);

  AttentionSizes sizes_;
  std::vector<AttentionTile> tiles_;
  std::vector<int32_t> tail_slots_;  // tiles_ points into these two
  std::vector<uint64_t> tail_masks_;
  int64_t covered_rows_ = 0, max_tile_rows_ = 0, max_len_ = 0, row_keys_ = 0;
};

}  // namespace rollout
