// Python's view of what neural drafts compute beside their networks.
#include "binding.h"
#include "ops.h"
#include "tree_growth.h"

namespace rollout::binding {

namespace {

void guesses(int dtype, Address logits, Dims2 shape, Dims2 strides, Address trees, Address levels,
             int64_t level, Address temperature, Address near, Address uniforms,
             int64_t levels_per_tree, Address ratios, Address token_ids, int64_t candidates,
             int64_t children, float near_share, Address tokens, Address probs, int threads) {
  require(shape[1] > 0, "logits_RD: must have a column");
  require(candidates > 0 && candidates <= kMaxGuessCandidates && children > 0,
          "candidates: must be from 1 to 64");
  rollout::guesses({.dtype = DType{dtype},
                    .logits = at(logits),
                    .row_stride = strides[0],
                    .vocab = shape[1],
                    .trees = at<const int64_t>(trees),
                    .levels = at<const int64_t>(levels),
                    .level = level,
                    .temperature = at<const float>(temperature),
                    .near = at<const float>(near),
                    .uniforms = at<const float>(uniforms),
                    .levels_per_tree = levels_per_tree,
                    .ratios = at<const float>(ratios),
                    .token_ids = at<const int64_t>(token_ids),
                    .candidates = candidates,
                    .children = children,
                    .near_share = near_share,
                    .tokens = at<int64_t>(tokens),
                    .probs = at<float>(probs)},
                   shape[0], threads);
}

using TreeAddresses = std::array<Address, 12>;

// The arrays of rollout.ops.tree_growth.arrays.TreeArrays, in its order; sizes: trees, width,
// candidates and nodes.
TreeGrowth growth_of(const Dims4& sizes, const TreeAddresses& arrays) {
  return {.trees = sizes[0],
          .width = sizes[1],
          .candidates = sizes[2],
          .nodes = sizes[3],
          .sizes = at<const int64_t>(arrays[0]),
          .depths = at<const int64_t>(arrays[1]),
          .floor = at<const float>(arrays[2]),
          .tokens = at<int32_t>(arrays[3]),
          .probs = at<float>(arrays[4]),
          .node_tokens = at<int64_t>(arrays[5]),
          .node_parents = at<int64_t>(arrays[6]),
          .node_masks = at<int64_t>(arrays[7]),
          .is_node = at<bool>(arrays[8]),
          .node_candidates = at<int32_t>(arrays[9]),
          .row_probs = at<float>(arrays[10]),
          .is_row = at<bool>(arrays[11])};
}

void add_children(Dims4 sizes, TreeAddresses arrays, int64_t level, Address tokens, Dims3 shape,
                  Dims3 token_strides, Address probs, Dims3 prob_strides) {
  require(shape == Dims3{sizes[0], level == 0 ? 1 : sizes[1], sizes[1]},
          "tokens_GFW: must have topk children of each row of the level");
  growth_of(sizes, arrays)
      .add(level, {.tokens = at<const int64_t>(tokens),
                   .token_tree_stride = token_strides[0],
                   .token_row_stride = token_strides[1],
                   .probs = at<const float>(probs),
                   .prob_tree_stride = prob_strides[0],
                   .prob_row_stride = prob_strides[1]});
}

void expand_trees(Dims4 sizes, TreeAddresses arrays, int64_t level) {
  growth_of(sizes, arrays).expand(level);
}

void choose_nodes(int64_t width, Dims2 candidates, Address tokens, int64_t token_stride,
                  Address probs, int64_t prob_stride, Address node_candidates, int64_t node_stride,
                  Address sizes, Address offsets, Address chosen_tokens, Address parents,
                  Address depths, Address masks, Address chosen_probs) {
  rollout::choose_nodes({.trees = candidates[0],
                         .width = width,
                         .candidates = candidates[1],
                         .tokens = at<const int32_t>(tokens),
                         .probs = at<const float>(probs),
                         .token_stride = token_stride,
                         .prob_stride = prob_stride,
                         .node_candidates = at<const int32_t>(node_candidates),
                         .node_stride = node_stride,
                         .sizes = at<const int64_t>(sizes),
                         .chosen_offsets = at<int64_t>(offsets),
                         .chosen_tokens = at<int32_t>(chosen_tokens),
                         .chosen_parents = at<int32_t>(parents),
                         .chosen_depths = at<int32_t>(depths),
                         .chosen_masks = at<uint64_t>(masks),
                         .chosen_probs = at<float>(chosen_probs)});
}

}  // namespace

void bind_drafts(nb::module_& m) {
  m.def("guesses", recorded<guesses>, "dtype"_a, "logits"_a, "shape"_a, "strides"_a, "trees"_a,
        "levels"_a, "level"_a, "temperature"_a, "near"_a, "uniforms"_a, "levels_per_tree"_a,
        "ratios"_a, "token_ids"_a, "candidates"_a, "children"_a, "near_share"_a, "tokens"_a,
        "probs"_a, "threads"_a, Unlocked());

  m.def("add_children", recorded<add_children>, "sizes"_a, "arrays"_a, "level"_a, "tokens"_a,
        "shape"_a, "token_strides"_a, "probs"_a, "prob_strides"_a);
  m.def("expand_trees", recorded<expand_trees>, "sizes"_a, "arrays"_a, "level"_a);
  m.def("choose_nodes", &choose_nodes, "width"_a, "candidates"_a, "tokens"_a, "token_stride"_a,
        "probs"_a, "prob_stride"_a, "node_candidates"_a, "node_stride"_a, "sizes"_a, "offsets"_a,
        "chosen_tokens"_a, "parents"_a, "depths"_a, "masks"_a, "chosen_probs"_a);
}

}  // namespace rollout::binding
