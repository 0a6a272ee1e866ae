#include "calibration.h"
#include "check.h"

namespace {

using namespace ngram;

const Evidence kEvidence{.source = Source::kLive, .match = 6, .count = 2, .share = 0.6, .depth = 1};

void estimates_follow_what_came() {
  for (const int percent : {5, 40, 90}) {
    Calibration calibration;
    for (int i = 0; i < 2000; ++i) {
      const Estimate estimate = calibration.estimate(kEvidence);
      calibration.observe(estimate.cell, estimate.prior, i * 37 % 100 < percent);
    }
    const double learned = calibration.estimate(kEvidence).probability;
    CHECK(learned > percent / 100.0 - 0.08 && learned < percent / 100.0 + 0.08);
  }
}

void decay_leads_back_to_the_prior() {
  Calibration calibration;
  const Estimate fresh = calibration.estimate(kEvidence);
  CHECK(fresh.probability == fresh.prior);
  for (int i = 0; i < 100; ++i) calibration.observe(fresh.cell, fresh.prior, false);
  const double low = calibration.estimate(kEvidence).probability;
  calibration.decay();
  const double later = calibration.estimate(kEvidence).probability;
  CHECK(low < later && later < fresh.prior);
}

void prior_rises_with_the_evidence() {
  const Calibration calibration;
  const auto prior = [&](Evidence evidence) { return calibration.estimate(evidence).probability; };
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
  estimates_follow_what_came();
  decay_leads_back_to_the_prior();
  prior_rises_with_the_evidence();
}
