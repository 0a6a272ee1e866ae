#include "calibration.h"
#include "check.h"

namespace {

using namespace ngram;

const Evidence kEvidence{.source = Source::kLive,
                         .match = 6,
                         .count = 2,
                         .share = 0.6,
                         .sources = 1 << static_cast<int>(Source::kLive),
                         .depth = 1};

bool near(double value, double expected, double distance) {
  return value > expected - distance && value < expected + distance;
}

void steps_follow_what_came() {
  for (const int percent : {5, 40, 90}) {
    Calibration calibration;
    for (int i = 0; i < 2000; ++i) {
      calibration.observe_step(calibration.step(kEvidence).basis, i * 37 % 100 < percent);
    }
    CHECK(near(calibration.step(kEvidence).probability, percent / 100.0, 0.08));
  }
}

// Tokens that never came true are believed less, also with other evidence, when all that speaks for
// them are the same sources.
void agreement_is_learned_beside_evidence() {
  Calibration calibration;
  Evidence other = kEvidence;
  other.match = 7;
  other.count = 3;
  const double before = calibration.step(other).probability;
  for (int i = 0; i < 200; ++i) calibration.observe_step(calibration.step(kEvidence).basis, false);
  CHECK(calibration.step(other).basis.evidence_cell !=
        calibration.step(kEvidence).basis.evidence_cell);
  CHECK(calibration.step(other).probability < before);
}

void paths_follow_what_came() {
  Calibration calibration;
  CHECK(near(calibration.path(0.37, 3), 0.37, 1e-12));
  CHECK(calibration.path(1.0, 1) < 1.0 && calibration.path(0.0, 1) == 0.0);
  for (int i = 0; i < 4000; ++i) {
    calibration.observe_path(0.37, 3, i * 37 % 100 < 60);
    calibration.observe_path(0.05, 3, false);
  }
  CHECK(near(calibration.path(0.37, 3), 0.6, 0.03));
  CHECK(calibration.path(0.05, 3) < 0.03);
  CHECK(calibration.path(0.02, 3) > 0 && calibration.path(0.02, 3) < calibration.path(0.03, 3));
  CHECK(near(calibration.path(0.37, 1), 0.37, 1e-12));  // of another depth
}

void decay_leads_back_to_the_prior() {
  Calibration calibration;
  const StepEstimate fresh = calibration.step(kEvidence);
  CHECK(near(fresh.probability, fresh.basis.prior, 1e-6));
  for (int i = 0; i < 100; ++i) {
    calibration.observe_step(fresh.basis, false);
    calibration.observe_path(0.5, 1, false);
  }
  const double low = calibration.step(kEvidence).probability, low_path = calibration.path(0.5, 1);
  calibration.decay();
  CHECK(low < calibration.step(kEvidence).probability);
  CHECK(calibration.step(kEvidence).probability < fresh.probability);
  CHECK(low_path < calibration.path(0.5, 1) && calibration.path(0.5, 1) < 0.5);
}

void prior_rises_with_the_evidence() {
  const Calibration calibration;
  const auto prior = [&](Evidence evidence) { return calibration.step(evidence).probability; };
  Evidence more = kEvidence;
  more.match = 7;
  CHECK(prior(more) > prior(kEvidence));
  more = kEvidence;
  more.count = 10;
  CHECK(prior(more) > prior(kEvidence));
  more = kEvidence;
  more.share = 0.7;
  CHECK(prior(more) > prior(kEvidence));
  more = kEvidence;
  more.source = Source::kGroup;
  CHECK(prior(more) > prior(kEvidence));
}

}  // namespace

void test_calibration() {
  steps_follow_what_came();
  agreement_is_learned_beside_evidence();
  paths_follow_what_came();
  decay_leads_back_to_the_prior();
  prior_rises_with_the_evidence();
}
