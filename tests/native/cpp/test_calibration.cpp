#include "calibration.h"
#include "check.h"

namespace {

using namespace ngram;

bool near(double value, double expected, double distance) {
  return value > expected - distance && value < expected + distance;
}

// Trees that are compared with the reference hold no path that is all but certain or hopeless.
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

}  // namespace

void test_calibration() { paths_follow_what_came(); }
