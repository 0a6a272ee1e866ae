#include "attention_schedule.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace rollout {
namespace {

constexpr int64_t kTileRowHeads = 48;             // amortises the transposition of keys
constexpr int64_t kTileScoreFloats = 512 * 1024;  // keeps a tile's scores near the core
constexpr int64_t kMaxNodes = kMaxTailKeys - 1;   // draft nodes of one tree

void require(bool condition, const char* field, int64_t entry, const char* remedy) {
  if (!condition) {
    throw std::invalid_argument("AttentionPlan." + std::string(field) + ", entry " +
                                std::to_string(entry) + ": " + remedy);
  }
}

bool all_within(const int32_t* slots, int64_t count, int64_t limit) {
  uint32_t largest = 0;  // a negative slot is a large one
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(slots[i]));
  return count == 0 || largest < limit;
}

void check_entry(const PlanArrays& plan, int64_t entry, int64_t slots) {
  const int64_t row = plan.rows[entry], start = plan.starts[entry];
  const int64_t run_len = plan.run_lens[entry];
  const int64_t first_node = plan.node_offsets[entry];
  const int64_t nodes = plan.node_offsets[entry + 1] - first_node;
  require(row >= 0 && row < plan.table_rows, "rows_B", entry, "no such row of req_to_token");
  require(run_len >= 1, "run_lens_B", entry, "must be >= 1");
  require(start >= 0 && start + run_len <= plan.max_context, "starts_B", entry,
          "the run must end within max_context");
  require(first_node >= 0 && nodes >= 0 && nodes <= kMaxNodes &&
              first_node + nodes <= static_cast<int64_t>(plan.node_slots.size()),
          "node_offsets_B1", entry, "must rise by 0 to 63 nodes, within N");
  const int64_t queries = plan.q_offsets[entry + 1] - plan.q_offsets[entry];
  require(queries >= 0 && queries <= run_len + nodes, "q_offsets_B1", entry,
          "must rise by at most run_len and the number of draft nodes");
  require(all_within(plan.req_to_token + row * plan.table_row_stride, start + run_len, slots),
          "req_to_token", entry, "names a slot outside the pool");
  require(all_within(plan.node_slots.data() + first_node, nodes, slots), "node_slots_N", entry,
          "names a slot outside the pool");
  for (int64_t node = 0; node < nodes; ++node) {
    const uint64_t mask = static_cast<uint64_t>(plan.node_masks[first_node + node]);
    require((mask & 1) != 0 && mask >> (node + 1) == 1, "node_masks_N", entry,
            "a path holds the root and the node itself, and no later node");
  }
}

}  // namespace

AttentionSchedule::AttentionSchedule(const PlanArrays& plan, const AttentionSizes& sizes)
    : sizes_(sizes) {
  if (sizes.kv_heads < 1 || sizes.heads % sizes.kv_heads != 0) {
    throw std::invalid_argument("heads must be a multiple of kv_heads");
  }
  const int64_t entries = static_cast<int64_t>(plan.rows.size());
  require(plan.q_offsets[0] == 0, "q_offsets_B1", 0, "must begin with 0");
  for (int64_t entry = 0; entry < entries; ++entry) check_entry(plan, entry, sizes.slots);
  covered_rows_ = plan.q_offsets[entries];
  if (covered_rows_ > sizes.query_rows) {
    throw std::invalid_argument("AttentionPlan.q_offsets_B1 ends behind the last query row");
  }
  tail_masks_.reserve(covered_rows_);
  for (int64_t entry = 0; entry < entries; ++entry) add_entry(plan, entry);
  const uint64_t* masks = tail_masks_.data();
  const int32_t* slots = tail_slots_.data();
  for (AttentionTile& tile : tiles_) {
    tile.tail_masks = masks;
    tile.tail_slots = slots;
    masks += tile.rows;
    slots += tile.tail_len;
  }
}

void AttentionSchedule::add_entry(const PlanArrays& plan, int64_t entry) {
  const int32_t* context = plan.req_to_token + plan.rows[entry] * plan.table_row_stride;
  const int32_t start = plan.starts[entry], run_len = plan.run_lens[entry];
  const int32_t first_node = plan.node_offsets[entry];
  const int32_t rows = run_len + plan.node_offsets[entry + 1] - first_node;
  // The entry's query rows are its last ones: what comes before is in the pools already.
  const int32_t first_query = rows - (plan.q_offsets[entry + 1] - plan.q_offsets[entry]);
  const int64_t group = sizes_.heads / sizes_.kv_heads;
  const int64_t len = start + rows;
  const int32_t tile_rows = static_cast<int32_t>(std::clamp<int64_t>(
      std::min((kTileRowHeads + group - 1) / group, kTileScoreFloats / (group * len)), 1,
      kMaxTailKeys));
  for (int32_t begin = first_query; begin < rows; begin += tile_rows) {
    const int32_t end = std::min(begin + tile_rows, rows);
    // Tail keys: what run tokens follow the tile's first row, then the draft nodes up to its last.
    const int32_t run_tail = std::max(std::min(end, run_len) - begin - 1, 0);
    const int32_t shared_len = start + std::min(begin + 1, run_len);
    const int32_t nodes = std::max(end - run_len, 0);
    for (int32_t row = begin; row < end; ++row) {
      const bool in_run = row < run_len;
      const uint64_t chain = (uint64_t{1} << (in_run ? row - begin : run_tail)) - 1;
      const uint64_t path =
          in_run ? 0 : static_cast<uint64_t>(plan.node_masks[first_node + row - run_len]) >> 1;
      tail_masks_.push_back(chain | path << run_tail);
    }
    tail_slots_.insert(tail_slots_.end(), context + shared_len, context + shared_len + run_tail);
    tail_slots_.insert(tail_slots_.end(), plan.node_slots.begin() + first_node,
                       plan.node_slots.begin() + first_node + nodes);
    tiles_.push_back({.shared_slots = context,
                      .tail_slots = nullptr,
                      .tail_masks = nullptr,
                      .shared_len = shared_len,
                      .tail_len = run_tail + nodes,
                      .first_row = plan.q_offsets[entry] + begin - first_query,
                      .rows = end - begin});
    max_tile_rows_ = std::max<int64_t>(max_tile_rows_, end - begin);
    max_len_ = std::max<int64_t>(max_len_, shared_len + run_tail + nodes);
    row_keys_ += static_cast<int64_t>(end - begin) * shared_len;
  }
}

}  // namespace rollout
