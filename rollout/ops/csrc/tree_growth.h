// Draft trees that grow level by level, in arrays that Python keeps. See
// rollout/ops/tree_growth/reference.py, which does the same.
#pragma once

#include <cstdint>

namespace rollout {

// Children of rows, [trees, rows, W]; a row stride of 0: all rows of a tree have the same.
struct Children {
  const int64_t* tokens;
  int64_t token_tree_stride, token_row_stride;
  const float* probs;
  int64_t prob_tree_stride, prob_row_stride;
};

// Rows of G trees: C candidates and N nodes. A level has W nodes, and a row W children.
struct TreeGrowth {
  int64_t trees, width, candidates, nodes;
  const int64_t* sizes;   // most nodes of each finished tree
  const int64_t* depths;  // how deep it may grow
  const float* floor;     // one number: what is less probable is no candidate
  int32_t* tokens;        // [G, C]
  float* probs;           // [G, C]; below 0: no candidate
  int64_t* node_tokens;   // [G, N], and so on
  int64_t* node_parents;
  int64_t* node_masks;
  bool* is_node;
  int32_t* node_candidates;  // below 0: none
  float* row_probs;          // [G, W]: of the rows whose children come next
  bool* is_row;              // [G, W]

  // Of the children of a level's rows: 0 for those of the roots.
  int64_t first_candidate(int64_t level) const {
    return level == 0 ? 0 : width * (1 + width * (level - 1));
  }

  // Adds the children [G, rows, W] of a level's rows, whose probabilities are given the row.
  void add(int64_t level, const Children& children) const;

  // Chooses the nodes of a level, 1 for children of the roots, from the children added last.
  void expand(int64_t level) const;
};

// What was grown of some trees, and the arrays that take their most probable candidates, as nodes
// of `DraftTrees`, one tree behind the other.
struct GrownTrees {
  int64_t trees, width;
  int64_t candidates;     // of each tree
  const int32_t* tokens;  // [trees, candidates], rows so many apart
  const float* probs;
  int64_t token_stride, prob_stride;
  const int32_t* node_candidates;  // [trees, nodes]
  int64_t node_stride;
  const int64_t* sizes;

  int64_t* chosen_offsets;  // [trees + 1]
  int32_t* chosen_tokens;   // as long as the sizes together, and so on
  int32_t* chosen_parents;
  int32_t* chosen_depths;
  uint64_t* chosen_masks;
  float* chosen_probs;
};

void choose_nodes(const GrownTrees& grown);

}  // namespace rollout
