#include "tree_builder.h"

#include <algorithm>
#include <array>

namespace ngram {

namespace {

// How much a match of each length weighs: each further token of context doubles it up to a point,
// so that long contexts decide and short ones break ties.
constexpr std::array<double, kMaxMatch + 1> make_match_weights() {
  std::array<double, kMaxMatch + 1> weights{};
  double weight = 1.0;
  for (std::uint32_t match = 0; match <= kMaxMatch; ++match) {
    weights[match] = weight;
    weight *= match < 12 ? 2.0 : 1.05;
  }
  return weights;
}

constexpr std::array<double, kMaxMatch + 1> kMatchWeights = make_match_weights();

}  // namespace

bool TreeBuilder::worse(const Pending& a, const Pending& b) {
  if (a.node.probability != b.node.probability) return a.node.probability < b.node.probability;
  return a.order > b.order;
}

void TreeBuilder::expand(const std::vector<Candidate>& candidates, std::int32_t tree_node,
                         const DraftNode& node, std::uint32_t begin, std::uint32_t end,
                         const Calibration& calibration) {
  children_.clear();
  double total = 0;
  for (std::uint32_t i = begin; i < end; ++i) {
    const Candidate& candidate = candidates[followers_[i].candidate];
    const Token token = candidate.log->token(followers_[i].position);
    const std::uint32_t match =
        std::min(candidate.match + static_cast<std::uint32_t>(node.depth), kMaxMatch);
    const double weight = candidate.weight * kMatchWeights[match];
    total += weight;
    auto child = std::find_if(children_.begin(), children_.end(),
                              [token](const Child& c) { return c.token == token; });
    if (child == children_.end()) {
      children_.push_back(Child{token, 1, match, candidate.source, weight});
      continue;
    }
    ++child->count;
    child->weight += weight;
    if (match > child->match) {
      child->match = match;
      child->source = candidate.source;
    }
  }
  for (const Child& child : children_) {
    const Estimate estimate = calibration.estimate(
        Evidence{child.source, child.match, child.count, child.weight / total, node.depth + 1});
    heap_.push_back(
        Pending{DraftNode{child.token, tree_node, node.depth + 1, node.mask,
                          node.probability * estimate.probability, estimate.prior, estimate.cell},
                begin, end, made_++});
    std::push_heap(heap_.begin(), heap_.end(), worse);
  }
}

const std::vector<DraftNode>& TreeBuilder::build(const std::vector<Candidate>& candidates,
                                                 std::int32_t max_nodes,
                                                 const Calibration& calibration) {
  nodes_.clear();
  followers_.clear();
  heap_.clear();
  made_ = 0;
  for (std::uint32_t i = 0; i < candidates.size(); ++i) {
    followers_.push_back(Follower{candidates[i].position, i});
  }
  const DraftNode root{
      .token = 0, .parent = -1, .depth = 0, .mask = 1, .probability = 1.0, .prior = 1.0, .cell = 0};
  expand(candidates, 0, root, 0, static_cast<std::uint32_t>(followers_.size()), calibration);
  while (!heap_.empty() && static_cast<std::int32_t>(nodes_.size()) < max_nodes) {
    std::pop_heap(heap_.begin(), heap_.end(), worse);
    Pending pending = heap_.back();
    heap_.pop_back();
    const auto tree_node = static_cast<std::int32_t>(nodes_.size()) + 1;
    pending.node.mask |= std::uint64_t{1} << tree_node;
    nodes_.push_back(pending.node);
    const auto begin = static_cast<std::uint32_t>(followers_.size());
    for (std::uint32_t i = pending.begin; i < pending.end; ++i) {
      const Follower follower = followers_[i];
      const TokenLog& log = *candidates[follower.candidate].log;
      if (log.token(follower.position) != pending.node.token) continue;
      const Position next = log.after(follower.position);
      if (next != kNoPosition) followers_.push_back(Follower{next, follower.candidate});
    }
    const auto end = static_cast<std::uint32_t>(followers_.size());
    expand(candidates, tree_node, pending.node, begin, end, calibration);
  }
  return nodes_;
}

}  // namespace ngram
