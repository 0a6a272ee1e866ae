// How often what the corpus proposes is right, learned from what came.
#ifndef NGRAM_NATIVE_CALIBRATION_H_
#define NGRAM_NATIVE_CALIBRATION_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "candidate.h"

namespace ngram {

// What the estimate of one proposed token rests on.
struct Evidence {
  Source source;        // of its longest match
  std::uint32_t match;  // longest context shared with an occurrence that proposes it
  std::uint32_t count;  // occurrences that propose it
  double share;         // of the weight of all occurrences, in (0, 1]
  std::int32_t depth;   // in the tree: 1 for a child of the root
};

// An estimate, and the cell that answers for it.
struct Estimate {
  double probability;  // that the token comes next, given that its parent did
  double prior;        // the same before calibration
  std::uint16_t cell;
};

// The prior is a back-off estimate (the escape of PPM, Cleary and Witten 1984: longer contexts are
// believed more, a lone witness less). Each cell, by source, match length, count, share and depth,
// keeps how often its proposals were right against how often the prior said they would be; the
// ratio corrects the prior. All arithmetic is plain IEEE double in a fixed order, so every platform
// agrees.
class Calibration {
 public:
  static constexpr std::size_t kMatchBuckets = 8;
  static constexpr std::size_t kShareBuckets = 6;
  static constexpr std::size_t kCountBuckets = 4;
  static constexpr std::size_t kDepthBuckets = 2;
  static constexpr std::size_t kCells =
      kNumSources * kMatchBuckets * kShareBuckets * kCountBuckets * kDepthBuckets;

  Estimate estimate(const Evidence& evidence) const;
  void observe(std::uint16_t cell, double prior, bool right);
  void decay();  // the policy changed: what was learned counts for less

 private:
  struct Cell {
    double expected = 0;
    double right = 0;
  };

  std::array<Cell, kCells> cells_{};
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CALIBRATION_H_
