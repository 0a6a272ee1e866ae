// Acceptance probabilities of proposed tokens, learned from the tokens that followed.
#ifndef NGRAM_NATIVE_CALIBRATION_H_
#define NGRAM_NATIVE_CALIBRATION_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "candidate.h"

namespace ngram {

// The evidence behind the estimate of one proposed token.
struct Evidence {
  Source source;         // of its longest match
  std::uint32_t match;   // longest context shared with an occurrence that proposes it
  std::uint32_t count;   // occurrences that propose it
  double share;          // of the weight of all occurrences, in (0, 1]
  std::uint8_t sources;  // bit s: one of source s proposes it
  std::int32_t depth;    // in the tree: 1 for a child of the root
};

// What an estimate was computed from, kept to learn from its outcome.
struct StepBasis {
  float prior;      // before any calibration
  float corrected;  // by the first table
  std::uint16_t evidence_cell;
  std::uint16_t agreement_cell;
};

// The estimate for one token, given that its parent is accepted.
struct StepEstimate {
  double probability;
  StepBasis basis;
};

// A back-off estimate (the escape of PPM, Cleary and Witten 1984: longer contexts are believed
// more, a lone witness less), corrected by three tables that are learned as tokens come:
//   1. by source, match length, count, share and depth: the ratio of hits to those expected;
//   2. by which sources agree, the estimate so far and depth: again the ratio;
//   3. the product of the steps along a path, by depth: a curve through the observed frequency,
//      straight between knots (as in the secondary estimation of PAQ, Mahoney 2005). Steps are not
//      independent: a copy that went right for long goes on.
// All arithmetic is plain IEEE in a fixed order, so every platform agrees.
class Calibration {
 public:
  Calibration();

  StepEstimate step(const Evidence& evidence) const;
  double path(double product, std::int32_t depth) const;

  void observe_step(const StepBasis& basis, bool right);
  void observe_path(double product, std::int32_t depth, bool right);
  void decay();  // the policy changed, so the past counts for less

  // Derives ratios and curves from the counts. Returns whether the counts are possible, since those
  // read from a file may be anything.
  bool settle();

 private:
  static constexpr std::size_t kMatchBuckets = 8;
  static constexpr std::size_t kShareBuckets = 6;
  static constexpr std::size_t kCountBuckets = 4;
  static constexpr std::size_t kDepthBuckets = 4;
  static constexpr std::size_t kLevelBuckets = 12;
  static constexpr std::size_t kEvidenceCells =
      kNumSources * kMatchBuckets * kShareBuckets * kCountBuckets * kDepthBuckets;
  static constexpr std::size_t kAgreementCells =
      (std::size_t{1} << kNumSources) * kLevelBuckets * kDepthBuckets;
  static constexpr std::size_t kSegments = 20;  // of the curve; a knot at each end

  struct Cell {
    double expected = 0;
    double right = 0;
    double ratio = 1;  // of the two, drawn towards 1
    void observe(double probability, bool came);
    void decay();
    void settle();
  };
  struct Knot {
    double count = 0;
    double right = 0;
    double at = 0;     // the product at which it stands
    double value = 0;  // the curve's height there
    void observe(double weight, double height);
    void decay();
    void settle();
  };

  std::array<Cell, kEvidenceCells> by_evidence_{};
  std::array<Cell, kAgreementCells> by_agreement_{};
  std::array<std::array<Knot, kSegments + 2>, kDepthBuckets> by_path_{};
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CALIBRATION_H_
