#include "calibration.h"

#include <algorithm>

namespace ngram {

namespace {

// Chosen on recorded rollouts, where the accept length is flat around them.
constexpr double kInertia = 2.0;     // expected hits the prior itself is worth
constexpr double kMaxMemory = 50.0;  // expected hits a cell remembers
constexpr double kDecay = 0.8;       // at a change of policy
constexpr double kHighest = 0.98;    // no continuation is certain
constexpr std::array<double, kNumSources> kTrust = {0.9, 0.6, 0.6};

std::size_t match_bucket(std::uint32_t match) {
  if (match <= 1) return 0;
  if (match <= 2) return 1;
  if (match <= 3) return 2;
  if (match <= 5) return 3;
  if (match <= 8) return 4;
  if (match <= 12) return 5;
  if (match <= 20) return 6;
  return 7;
}

std::size_t share_bucket(double share) {
  if (share < 0.1) return 0;
  if (share < 0.25) return 1;
  if (share < 0.5) return 2;
  if (share < 0.75) return 3;
  if (share < 0.95) return 4;
  return 5;
}

std::size_t count_bucket(std::uint32_t count) {
  if (count <= 1) return 0;
  if (count <= 2) return 1;
  if (count <= 5) return 2;
  return 3;
}

}  // namespace

Estimate Calibration::estimate(const Evidence& evidence) const {
  const double match = evidence.match;
  const double count = evidence.count;
  const double prior = kTrust[static_cast<std::size_t>(evidence.source)] * evidence.share *
                       (match / (match + 0.7)) * (count / (count + 0.1));
  std::size_t cell = static_cast<std::size_t>(evidence.source);
  cell = cell * kMatchBuckets + match_bucket(evidence.match);
  cell = cell * kShareBuckets + share_bucket(evidence.share);
  cell = cell * kCountBuckets + count_bucket(evidence.count);
  cell = cell * kDepthBuckets + (evidence.depth > 1 ? 1 : 0);
  const Cell& seen = cells_[cell];
  const double ratio = (seen.right + kInertia) / (seen.expected + kInertia);
  return Estimate{std::min(prior * ratio, kHighest), prior, static_cast<std::uint16_t>(cell)};
}

void Calibration::observe(std::uint16_t cell, double prior, bool right) {
  Cell& seen = cells_[cell];
  seen.expected += prior;
  if (right) seen.right += 1.0;
  if (seen.expected > kMaxMemory) {
    seen.expected *= 0.5;
    seen.right *= 0.5;
  }
}

void Calibration::decay() {
  for (Cell& cell : cells_) {
    cell.expected *= kDecay;
    cell.right *= kDecay;
  }
}

}  // namespace ngram
