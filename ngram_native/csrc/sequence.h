// One open sequence.
#ifndef NGRAM_NATIVE_SEQUENCE_H_
#define NGRAM_NATIVE_SEQUENCE_H_

#include <cstdint>
#include <vector>

#include "chained_log.h"
#include "context.h"
#include "types.h"

namespace ngram {

// A proposed node, as far as the tokens that come can judge it.
struct Guess {
  Token token;
  std::uint16_t cell;   // of the calibration
  std::uint8_t parent;  // tree numbering
  double prior;
};

struct Sequence {
  Cursor cursor;               // its place in the live log; carries the group
  Context context;             // ends with the root, the last committed token
  std::vector<Guess> guesses;  // what was last proposed; forgotten when the next tokens came
  std::uint64_t named_by = 0;  // the last call that named this sequence, to catch duplicates
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_SEQUENCE_H_
