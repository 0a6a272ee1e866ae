#include "tree_growth.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace rollout {

namespace {

constexpr float kNone = -1.0f;

// The indices of the values, the largest first, of equals the first.
void sort_falling(const float* values, std::vector<int64_t>& order) {
  std::stable_sort(order.begin(), order.end(),
                   [values](int64_t a, int64_t b) { return values[a] > values[b]; });
}

std::vector<int64_t> range(int64_t first, int64_t last) {
  std::vector<int64_t> found(static_cast<size_t>(last - first));
  std::iota(found.begin(), found.end(), first);
  return found;
}

}  // namespace

void TreeGrowth::add(int64_t level, const Children& children) const {
  const int64_t first = first_candidate(level), rows = level == 0 ? 1 : width;
  for (int64_t tree = 0; tree < trees; ++tree) {
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_one = level == 0 ? sizes[tree] > 0 : is_row[tree * width + row];
      const float before = level == 0 ? 1.0f : row_probs[tree * width + row];
      const int64_t* own_tokens =
          children.tokens + tree * children.token_tree_stride + row * children.token_row_stride;
      const float* own_probs =
          children.probs + tree * children.prob_tree_stride + row * children.prob_row_stride;
      for (int64_t w = 0; w < width; ++w) {
        const int64_t candidate = tree * candidates + first + row * width + w;
        const float prob = before * own_probs[w];
        tokens[candidate] = static_cast<int32_t>(own_tokens[w]);
        probs[candidate] = is_one && prob >= *floor ? prob : kNone;
      }
    }
  }
}

void TreeGrowth::expand(int64_t level) const {
  const int64_t first = first_candidate(level - 1);
  const int64_t last = first_candidate(level);
  const int64_t first_node = width * (level - 1);
  std::vector<int64_t> order;
  for (int64_t tree = 0; tree < trees; ++tree) {
    const float* own_probs = probs + tree * candidates;
    order = range(first, last);
    sort_falling(own_probs, order);
    for (int64_t w = 0; w < width; ++w) {
      const int64_t row = tree * width + w, node = tree * nodes + first_node + w;
      const int64_t chosen = order[static_cast<size_t>(w)];
      const float prob = own_probs[chosen];
      // Its rank among all candidates of the tree: it may yet have children.
      int64_t rank = 0;
      for (int64_t c = 0; c < last; ++c) {
        rank += own_probs[c] > prob || (own_probs[c] == prob && c < chosen);
      }
      const bool is_one = prob >= 0 && rank < sizes[tree] - 1 && depths[tree] > level;
      const int64_t parent = level == 1 ? -1 : first_node - width + (chosen - first) / width;
      const int64_t above = level == 1 || !is_one ? 1 : node_masks[tree * nodes + parent];
      node_tokens[node] = is_one ? tokens[tree * candidates + chosen] : 0;
      node_parents[node] = parent;
      node_masks[node] = above | int64_t{1} << (first_node + w + 1);
      is_node[node] = is_one;
      node_candidates[node] = is_one ? static_cast<int32_t>(chosen) : -1;
      row_probs[row] = prob;
      is_row[row] = is_one;
    }
  }
}

void choose_nodes(const GrownTrees& grown) {
  std::vector<int64_t> order, numbers(static_cast<size_t>(grown.candidates));
  int64_t end = 0;
  grown.chosen_offsets[0] = 0;
  for (int64_t tree = 0; tree < grown.trees; ++tree) {
    const float* probs = grown.probs + tree * grown.prob_stride;
    const int32_t* tokens = grown.tokens + tree * grown.token_stride;
    const int32_t* nodes = grown.node_candidates + tree * grown.node_stride;
    order.clear();
    for (int64_t c = 0; c < grown.candidates; ++c) {
      if (probs[c] >= 0) order.push_back(c);
    }
    sort_falling(probs, order);
    const int64_t count = std::min(static_cast<int64_t>(order.size()), grown.sizes[tree]);
    const int64_t begin = end - 1;  // node numbers count from 1
    for (int64_t number = 1; number <= count; ++number, ++end) {
      const int64_t candidate = order[static_cast<size_t>(number - 1)];
      const int64_t row = candidate / grown.width;  // whose child it is
      const int64_t parent = row == 0 ? 0 : numbers[static_cast<size_t>(nodes[row - 1])];
      numbers[static_cast<size_t>(candidate)] = number;
      grown.chosen_tokens[end] = tokens[candidate];
      grown.chosen_parents[end] = static_cast<int32_t>(parent);
      grown.chosen_depths[end] = static_cast<int32_t>(row == 0 ? 1 : 2 + (row - 1) / grown.width);
      grown.chosen_masks[end] =
          (parent == 0 ? 1 : grown.chosen_masks[begin + parent]) | uint64_t{1} << number;
      grown.chosen_probs[end] = probs[candidate];
    }
    grown.chosen_offsets[tree + 1] = end;
  }
}

}  // namespace rollout
