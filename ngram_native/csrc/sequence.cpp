#include "sequence.h"

#include <bit>

namespace ngram {

std::size_t Sequence::judge(std::span<const Token> tokens, Calibration& calibration) {
  std::uint64_t accepted = 1;  // by tree number; the root came true
  std::uint64_t unknown = 0;   // came true or not: the tokens end before it
  for (std::size_t j = 0; j < guesses.size(); ++j) {
    const Guess& guess = guesses[j];
    const std::uint64_t self = std::uint64_t{1} << (j + 1);
    const bool parent_came = accepted >> guess.parent & 1;
    if (unknown >> guess.parent & 1 || (parent_came && guess.depth > tokens.size())) {
      unknown |= self;
      continue;
    }
    const bool right = parent_came && tokens[guess.depth - 1u] == guess.token;
    if (right) accepted |= self;
    if (parent_came) calibration.observe_step(guess.basis, right);
    // Below a node that was not handed out only misses are sure to be seen.
    if (guess.parent <= drafted) calibration.observe_path(guess.product, guess.depth, right);
  }
  guesses.clear();
  return static_cast<std::size_t>(std::popcount(accepted)) - 1;
}

}  // namespace ngram
