#include "calibration.h"

#include <algorithm>

namespace ngram {

namespace {

// Chosen on recorded rollouts, where the accept length is flat around them.
constexpr double kInertia = 2.0;       // the estimate itself counts as this many expected hits
constexpr double kMaxMemory = 200.0;   // expected hits that a cell remembers
constexpr double kKnotInertia = 20.0;  // the straight line counts as this many nodes
constexpr double kKnotMemory = 1000.0;
constexpr double kDecay = 0.8;     // at a change of policy
constexpr double kHighest = 0.98;  // no continuation is certain
constexpr std::array<double, kNumSources> kTrust = {0.9, 0.6, 0.6, 0.5};

// The curve goes through 0 and stays above this share of the straight line, so that unlikely nodes
// keep their order.
constexpr double kLowestSlope = 0.02;
constexpr double kHighestPath = 0.995;

constexpr double kMostHits = 1e9;  // a file with more in a cell was not written by this program

// buckets[i] is the number of `ends` that are at most i.
template <std::size_t kSize, std::size_t kEnds>
constexpr std::array<std::uint8_t, kSize> make_buckets(const std::array<std::size_t, kEnds>& ends) {
  std::array<std::uint8_t, kSize> buckets{};
  for (std::size_t i = 0; i < kSize; ++i) {
    for (const std::size_t end : ends) buckets[i] += i >= end ? 1 : 0;
  }
  return buckets;
}

// Tables, because comparisons would be mispredicted.
constexpr auto kMatchBucket =
    make_buckets<kMaxMatch + 1>(std::array<std::size_t, 7>{2, 3, 4, 6, 9, 13, 21});
constexpr auto kShareBucket =
    make_buckets<21>(std::array<std::size_t, 5>{2, 5, 10, 15, 19});  // of 20
constexpr auto kCountBucket = make_buckets<7>(std::array<std::size_t, 3>{2, 3, 6});
constexpr auto kDepthBucket = make_buckets<6>(std::array<std::size_t, 3>{2, 3, 5});
constexpr auto kLevelBucket =
    make_buckets<101>(std::array<std::size_t, 11>{3, 6, 10, 16, 25, 35, 50, 65, 80, 90, 95});  // %

// Belief in a match by its number of tokens, and by its number of witnesses.
constexpr std::size_t kManyWitnesses = 64;
constexpr std::array<double, kMaxMatch + 1> kMatchBelief = [] {
  std::array<double, kMaxMatch + 1> belief{};
  for (std::size_t match = 0; match < belief.size(); ++match) {
    belief[match] = static_cast<double>(match) / (static_cast<double>(match) + 0.7);
  }
  return belief;
}();
constexpr std::array<double, kManyWitnesses + 1> kCountBelief = [] {
  std::array<double, kManyWitnesses + 1> belief{};
  for (std::size_t count = 0; count < belief.size(); ++count) {
    belief[count] = static_cast<double>(count) / (static_cast<double>(count) + 0.1);
  }
  return belief;
}();

std::size_t depth_bucket(std::int32_t depth) {
  return kDepthBucket[std::min<std::size_t>(static_cast<std::size_t>(depth),
                                            kDepthBucket.size() - 1)];
}

}  // namespace

Calibration::Calibration() { settle(); }

StepEstimate Calibration::step(const Evidence& evidence) const {
  const auto source = static_cast<std::size_t>(evidence.source);
  const std::size_t count = evidence.count;
  const std::size_t depth = depth_bucket(evidence.depth);
  const double prior = kTrust[source] * evidence.share * kMatchBelief[evidence.match] *
                       kCountBelief[std::min(count, kManyWitnesses)];
  std::size_t cell = source;
  cell = cell * kMatchBuckets + kMatchBucket[evidence.match];
  cell = cell * kShareBuckets + kShareBucket[static_cast<std::size_t>(evidence.share * 20.0)];
  cell = cell * kCountBuckets + kCountBucket[std::min(count, kCountBucket.size() - 1)];
  cell = cell * kDepthBuckets + depth;
  const double corrected = std::min(prior * by_evidence_[cell].ratio, kHighest);
  std::size_t agreement = evidence.sources;
  agreement = agreement * kLevelBuckets + kLevelBucket[static_cast<std::size_t>(corrected * 100.0)];
  agreement = agreement * kDepthBuckets + depth;
  const double probability = std::min(corrected * by_agreement_[agreement].ratio, kHighest);
  return StepEstimate{probability,
                      {static_cast<float>(prior), static_cast<float>(corrected),
                       static_cast<std::uint16_t>(cell), static_cast<std::uint16_t>(agreement)}};
}

double Calibration::path(double product, std::int32_t depth) const {
  const auto& curve = by_path_[depth_bucket(depth)];
  const double x = product * kSegments;
  const auto k = static_cast<std::size_t>(x);
  const double beyond = x - static_cast<double>(k);
  const double height = (1.0 - beyond) * curve[k].value + beyond * curve[k + 1].value;
  return std::min(height, kHighestPath);
}

void Calibration::observe_step(const StepBasis& basis, bool right) {
  by_evidence_[basis.evidence_cell].observe(basis.prior, right);
  by_agreement_[basis.agreement_cell].observe(basis.corrected, right);
}

void Calibration::observe_path(double product, std::int32_t depth, bool right) {
  auto& curve = by_path_[depth_bucket(depth)];
  const double x = product * kSegments;
  const auto k = static_cast<std::size_t>(x);
  const double beyond = x - static_cast<double>(k);
  // Each knot learns how far the outcome was from the straight line, in proportion to nearness.
  const double above = (right ? 1.0 : 0.0) - product;
  curve[k].observe(1.0 - beyond, curve[k].at + above);
  curve[k + 1].observe(beyond, curve[k + 1].at + above);
}

void Calibration::decay() {
  for (Cell& cell : by_evidence_) cell.decay();
  for (Cell& cell : by_agreement_) cell.decay();
  for (auto& curve : by_path_) {
    for (Knot& knot : curve) knot.decay();
  }
}

bool Calibration::settle() {
  const auto within = [](double value, double limit) { return value >= -limit && value <= limit; };
  const auto settle_cell = [&](Cell& cell) {
    cell.settle();
    return within(cell.expected, kMaxMemory) && cell.expected >= 0 && cell.right >= 0 &&
           within(cell.right, kMostHits);
  };
  bool sound = std::ranges::all_of(by_evidence_, settle_cell) &&
               std::ranges::all_of(by_agreement_, settle_cell);
  for (std::size_t d = 0; d < kDepthBuckets; ++d) {
    for (std::size_t k = 0; k < by_path_[d].size(); ++k) {
      Knot& knot = by_path_[d][k];
      knot.at = static_cast<double>(k) / kSegments;
      knot.settle();
      sound = sound && within(knot.count, kKnotMemory) && knot.count >= 0 &&
              within(knot.right, 3.0 * kKnotMemory);
    }
  }
  return sound;
}

void Calibration::Cell::observe(double probability, bool came) {
  expected += probability;
  if (came) right += 1.0;
  if (expected > kMaxMemory) {
    expected *= 0.5;
    right *= 0.5;
  }
  settle();
}

void Calibration::Cell::decay() {
  expected *= kDecay;
  right *= kDecay;
  settle();
}

void Calibration::Cell::settle() { ratio = (right + kInertia) / (expected + kInertia); }

void Calibration::Knot::observe(double weight, double height) {
  count += weight;
  right += weight * height;
  if (count > kKnotMemory) {
    count *= 0.5;
    right *= 0.5;
  }
  settle();
}

void Calibration::Knot::decay() {
  count *= kDecay;
  right *= kDecay;
  settle();
}

void Calibration::Knot::settle() {
  const double learned = (right + kKnotInertia * at) / (count + kKnotInertia);
  value = at > 0 ? std::max(learned, kLowestSlope * at) : 0.0;
}

}  // namespace ngram
