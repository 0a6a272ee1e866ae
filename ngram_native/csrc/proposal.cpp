#include "proposal.h"

namespace ngram {

void Proposal::add(const std::vector<DraftNode>& nodes, std::int32_t budget,
                   double min_probability) {
  std::int32_t left = budget;
  for (const DraftNode& node : nodes) {
    if (left-- == 0 || node.probability < min_probability) break;
    tokens.push_back(node.token);
    parents.push_back(node.parent);
    depths.push_back(node.depth);
    masks.push_back(node.mask);
    probabilities.push_back(static_cast<float>(node.probability));
  }
  offsets.push_back(static_cast<std::int64_t>(tokens.size()));
}

}  // namespace ngram
