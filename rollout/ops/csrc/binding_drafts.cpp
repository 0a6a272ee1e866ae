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

void make_growth(TreeGrowth* growth, int64_t trees, int64_t width, int64_t candidates,
                 int64_t nodes, Address sizes, Address depths, Address floor, Address tokens,
                 Address probs, Address node_tokens, Address node_parents, Address node_masks,
                 Address is_node, Address node_candidates, Address row_probs, Address is_row) {
  new (growth) TreeGrowth{.trees = trees,
                          .width = width,
                          .candidates = candidates,
                          .nodes = nodes,
                          .sizes = at<const int64_t>(sizes),
                          .depths = at<const int64_t>(depths),
                          .floor = at<const float>(floor),
                          .tokens = at<int32_t>(tokens),
                          .probs = at<float>(probs),
                          .node_tokens = at<int64_t>(node_tokens),
                          .node_parents = at<int64_t>(node_parents),
                          .node_masks = at<int64_t>(node_masks),
                          .is_node = at<bool>(is_node),
                          .node_candidates = at<int32_t>(node_candidates),
                          .row_probs = at<float>(row_probs),
                          .is_row = at<bool>(is_row)};
}

void add_children(const TreeGrowth& growth, int64_t level, Address tokens, Dims3 token_strides,
                  Address probs, Dims3 prob_strides) {
  growth.add(level, {.tokens = at<const int64_t>(tokens),
                     .token_tree_stride = token_strides[0],
                     .token_row_stride = token_strides[1],
                     .probs = at<const float>(probs),
                     .prob_tree_stride = prob_strides[0],
                     .prob_row_stride = prob_strides[1]});
}

void expand_trees(const TreeGrowth& growth, int64_t level) { growth.expand(level); }

void choose_nodes(int64_t width, Dims2 candidates, int64_t nodes, Address tokens,
                  int64_t token_stride, Address probs, int64_t prob_stride, Address node_candidates,
                  int64_t node_stride, Address sizes, Address offsets, Address chosen_tokens,
                  Address parents, Address depths, Address masks, Address chosen_probs) {
  rollout::choose_nodes({.trees = candidates[0],
                         .width = width,
                         .candidates = candidates[1],
                         .nodes = nodes,
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

  nb::class_<TreeGrowth>(m, "TreeGrowth", "Draft trees that grow in arrays, which it borrows.")
      .def("__init__", &make_growth, "trees"_a, "width"_a, "candidates"_a, "nodes"_a, "sizes"_a,
           "depths"_a, "floor"_a, "tokens"_a, "probs"_a, "node_tokens"_a, "node_parents"_a,
           "node_masks"_a, "is_node"_a, "node_candidates"_a, "row_probs"_a, "is_row"_a);
  m.def("add_children", recorded<add_children>, "growth"_a, "level"_a, "tokens"_a,
        "token_strides"_a, "probs"_a, "prob_strides"_a);
  m.def("expand_trees", recorded<expand_trees>, "growth"_a, "level"_a);
  m.def("choose_nodes", &choose_nodes, "width"_a, "candidates"_a, "nodes"_a, "tokens"_a,
        "token_stride"_a, "probs"_a, "prob_stride"_a, "node_candidates"_a, "node_stride"_a,
        "sizes"_a, "offsets"_a, "chosen_tokens"_a, "parents"_a, "depths"_a, "masks"_a,
        "chosen_probs"_a);
}

}  // namespace rollout::binding
