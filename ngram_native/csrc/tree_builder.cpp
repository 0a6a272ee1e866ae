#include "tree_builder.h"

#include <algorithm>

namespace ngram {

bool TreeBuilder::worse(const Rank& a, const Rank& b) {
  if (a.probability != b.probability) return a.probability < b.probability;
  return a.pending > b.pending;
}

// Groups the undivided followers of a node by their token and makes each group a child. The loops
// read through local pointers, because the compiler must assume that their stores change members.
void TreeBuilder::add_children(const Candidates& candidates, const Calibration& calibration,
                               std::int32_t tree_node) {
  const Candidate* const all = candidates.data();
  Follower* const undivided = undivided_.data();
  Follower* followers = followers_.data() + num_followers_;
  const bool at_root = tree_node == 0;
  const DraftNode* const node =
      at_root ? nullptr : &nodes_[static_cast<std::size_t>(tree_node) - 1];
  const double parent_product = at_root ? 1.0 : node->product;
  const double parent_probability = at_root ? 1.0 : node->probability;
  const std::int32_t depth = at_root ? 0 : node->depth;
  std::size_t left = num_undivided_;
  double total = 0;
  for (std::size_t i = 0; i < left; ++i) total += all[undivided[i].candidate].weight;
  const double whole = 1.0 / total;
  while (left > 0) {
    const Token token = undivided[0].token;
    std::size_t agreeing = 0;
    std::size_t others = 0;
    // Without branches: which follower agrees cannot be predicted.
    for (std::size_t i = 0; i < left; ++i) {
      const Follower follower = undivided[i];
      const bool agrees = follower.token == token;
      followers[agreeing] = follower;
      undivided[others] = follower;
      agreeing += agrees;
      others += !agrees;
    }
    left = others;

    double weight = 0;
    std::uint32_t sources = 0;
    const Candidate* longest = all + followers[0].candidate;
    for (std::size_t i = 0; i < agreeing; ++i) {
      const Candidate* const candidate = all + followers[i].candidate;
      weight += candidate->weight;
      sources |= 1u << static_cast<unsigned>(candidate->source);
      if (candidate->match > longest->match) longest = candidate;
    }
    const StepEstimate step = calibration.step(
        Evidence{.source = longest->source,
                 .match = std::min(longest->match + static_cast<std::uint32_t>(depth), kMaxMatch),
                 .count = static_cast<std::uint32_t>(agreeing),
                 .share = std::min(weight * whole, 1.0),
                 .sources = static_cast<std::uint8_t>(sources),
                 .depth = depth + 1});
    const auto product = static_cast<float>(parent_product * step.probability);
    const double probability = std::min(parent_probability, calibration.path(product, depth + 1));
    heap_.push_back(Rank{probability, static_cast<std::uint32_t>(pending_.size())});
    std::push_heap(heap_.begin(), heap_.end(), worse);
    const auto begin = static_cast<std::uint32_t>(followers - followers_.data());
    followers += agreeing;
    pending_.push_back(Pending{token, tree_node, step.basis, product, longest->source, begin,
                               begin + static_cast<std::uint32_t>(agreeing)});
  }
  num_followers_ = static_cast<std::size_t>(followers - followers_.data());
}

const std::vector<DraftNode>& TreeBuilder::build(const Candidates& candidates,
                                                 std::int32_t max_nodes,
                                                 const Calibration& calibration) {
  nodes_.clear();
  pending_.clear();
  heap_.clear();
  num_followers_ = 0;
  num_undivided_ = candidates.size();
  // A level has at most all candidates, and the loops write one element beyond.
  if (undivided_.size() <= num_undivided_) undivided_.resize(num_undivided_ + 1);
  const std::size_t max_followers = (static_cast<std::size_t>(max_nodes) + 1) * num_undivided_ + 1;
  if (followers_.size() < max_followers) followers_.resize(max_followers);
  const Candidate* const all = candidates.data();
  const Token* const tokens = candidates.continuations();
  const std::uint32_t stride = candidates.depth();
  for (std::uint32_t i = 0; i < num_undivided_; ++i) {
    undivided_[i] = Follower{tokens[i * stride], i};
  }
  add_children(candidates, calibration, 0);
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), worse);
    const Rank rank = heap_.back();
    heap_.pop_back();
    const Pending best = pending_[rank.pending];
    const auto tree_node = static_cast<std::int32_t>(nodes_.size()) + 1;
    const DraftNode* parent =
        best.parent == 0 ? nullptr : &nodes_[static_cast<std::size_t>(best.parent) - 1];
    const std::int32_t depth = parent ? parent->depth + 1 : 1;
    const std::uint64_t mask = (parent ? parent->mask : 1) | std::uint64_t{1} << tree_node;
    nodes_.push_back(DraftNode{best.token, best.parent, depth, best.source, best.basis,
                               best.product, rank.probability, mask});
    if (tree_node == max_nodes) break;
    const auto level = static_cast<std::uint32_t>(depth);
    const Follower* const followers = followers_.data();
    Follower* const undivided = undivided_.data();
    std::size_t going_on = 0;
    for (std::uint32_t i = best.begin; i < best.end; ++i) {
      const std::uint32_t candidate = followers[i].candidate;
      // Past the continuation's end this writes a token that the next candidate overwrites.
      undivided[going_on] = Follower{tokens[candidate * stride + level], candidate};
      going_on += all[candidate].length > level;
    }
    num_undivided_ = going_on;
    if (going_on > 0) add_children(candidates, calibration, tree_node);
  }
  return nodes_;
}

}  // namespace ngram
