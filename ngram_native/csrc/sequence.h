// One open sequence.
#ifndef NGRAM_NATIVE_SEQUENCE_H_
#define NGRAM_NATIVE_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "calibration.h"
#include "chained_log.h"
#include "context.h"
#include "types.h"

namespace ngram {

// A node of a grown tree, kept until the next tokens say whether it was right.
struct Guess {
  Token token;
  std::uint8_t parent;  // tree numbering
  std::uint8_t depth;
  StepBasis basis;
  float product;  // of the estimates of the steps along its path
};

struct Sequence {
  Cursor cursor;               // where it ends in the live log; carries the group
  Context context;             // ends with the root, the last committed token
  std::vector<Guess> guesses;  // the tree last grown; cleared when the next tokens come
  // Nodes handed out since tokens last came: the first of the guesses. Resetting or loading
  // the corpus drops the guesses but not this number: the target may still be verifying the nodes.
  std::size_t drafted = 0;
  std::uint64_t named_by = 0;  // the last call that named this sequence, to catch duplicates

  // Compares the guesses with `tokens`, which come next in the sequence, teaches the calibration
  // what they decide, and forgets the guesses. The target sampled after the root and after each of
  // the first `verified` nodes that came true. Returns how many guesses came true.
  std::size_t judge(std::span<const Token> tokens, std::size_t verified, Calibration& calibration);
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_SEQUENCE_H_
