#include "proposal.h"

#include <algorithm>

namespace ngram {

void Proposal::reserve(std::size_t entries, std::size_t nodes) {
  offsets.reserve(entries + 1);
  tokens.reserve(nodes);
  parents.reserve(nodes);
  depths.reserve(nodes);
  masks.reserve(nodes);
  probabilities.reserve(nodes);
  sources.reserve(nodes);
}

std::size_t Proposal::add(const std::vector<DraftNode>& nodes, std::int32_t budget,
                          double min_probability) {
  const std::size_t most = std::min(nodes.size(), static_cast<std::size_t>(budget));
  std::size_t count = 0;
  while (count < most && nodes[count].probability >= min_probability) ++count;
  const std::size_t before = tokens.size();
  const std::size_t after = before + count;
  tokens.resize(after);
  parents.resize(after);
  depths.resize(after);
  masks.resize(after);
  probabilities.resize(after);
  sources.resize(after);
  for (std::size_t j = 0; j < count; ++j) {
    const DraftNode& node = nodes[j];
    tokens[before + j] = node.token;
    parents[before + j] = node.parent;
    depths[before + j] = node.depth;
    masks[before + j] = node.mask;
    probabilities[before + j] = static_cast<float>(node.probability);
    sources[before + j] = static_cast<std::uint8_t>(node.source);
  }
  offsets.push_back(static_cast<std::int64_t>(after));
  return count;
}

}  // namespace ngram
