// The draft nodes of a batch, in the form the caller gets.
#ifndef NGRAM_NATIVE_PROPOSAL_H_
#define NGRAM_NATIVE_PROPOSAL_H_

#include <cstdint>
#include <vector>

#include "tree_builder.h"
#include "types.h"

namespace ngram {

// Flat: entry b owns nodes [offsets[b], offsets[b + 1]).
struct Proposal {
  std::vector<std::int64_t> offsets{0};
  std::vector<Token> tokens;
  std::vector<std::int32_t> parents;
  std::vector<std::int32_t> depths;
  std::vector<std::uint64_t> masks;
  std::vector<float> probabilities;
  std::vector<std::uint8_t> sources;

  void reserve(std::size_t entries, std::size_t nodes);

  // Appends an entry: the first nodes, as many as the budget and the floor allow. Returns how many.
  std::size_t add(const std::vector<DraftNode>& nodes, std::int32_t budget, double min_probability);
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_PROPOSAL_H_
