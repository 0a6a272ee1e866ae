// The invariants of an entry of a proposal.
#ifndef NGRAM_NATIVE_TESTS_CHECK_TREE_H_
#define NGRAM_NATIVE_TESTS_CHECK_TREE_H_

#include <cstddef>
#include <cstdint>

#include "check.h"
#include "proposal.h"

namespace ngram {

// What verification relies on: at most `budget` nodes, parents before children, masks and depths
// that agree with them, no two siblings alike.
inline void check_shape(const Proposal& proposal, std::size_t entry, std::int32_t budget) {
  const auto begin = static_cast<std::size_t>(proposal.offsets[entry]);
  const auto end = static_cast<std::size_t>(proposal.offsets[entry + 1]);
  CHECK(begin <= end && end <= proposal.tokens.size());
  CHECK(end - begin <= static_cast<std::size_t>(budget));
  for (std::size_t j = begin; j < end; ++j) {
    const auto node = static_cast<std::int32_t>(j - begin) + 1;
    const std::int32_t parent = proposal.parents[j];
    CHECK(parent >= 0 && parent < node && proposal.tokens[j] >= 0);
    const std::size_t above = begin + static_cast<std::size_t>(parent) - 1;
    CHECK(proposal.depths[j] == (parent == 0 ? 1 : proposal.depths[above] + 1));
    CHECK(proposal.masks[j] ==
          ((parent == 0 ? 1u : proposal.masks[above]) | std::uint64_t{1} << node));
    for (std::size_t k = begin; k < j; ++k) {
      CHECK(proposal.parents[k] != parent || proposal.tokens[k] != proposal.tokens[j]);
    }
  }
}

// And that estimates are probabilities, best first, falling along every path.
inline void check_tree(const Proposal& proposal, std::size_t entry, std::int32_t budget,
                       double min_probability = 0) {
  check_shape(proposal, entry, budget);
  const auto begin = static_cast<std::size_t>(proposal.offsets[entry]);
  const auto end = static_cast<std::size_t>(proposal.offsets[entry + 1]);
  for (std::size_t j = begin; j < end; ++j) {
    const float probability = proposal.probabilities[j];
    CHECK(probability > 0 && probability < 1);
    CHECK(probability >= static_cast<float>(min_probability));
    if (j > begin) CHECK(probability <= proposal.probabilities[j - 1]);
    const auto parent = static_cast<std::size_t>(proposal.parents[j]);
    if (parent > 0) CHECK(probability <= proposal.probabilities[begin + parent - 1]);
  }
}

}  // namespace ngram

#endif  // NGRAM_NATIVE_TESTS_CHECK_TREE_H_
