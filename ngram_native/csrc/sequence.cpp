#include "sequence.h"

#include <bit>

namespace ngram {

// To learn from a guess only when it came true, or only when it did not, would bias the estimates.
// So a guess counts only where its outcome would be known either way:
//
// - A child of the root or of a verified node. If its parent came true, the target sampled a token
//   after the parent, and the child is that token or not. If its parent failed, so did the child.
// - A child of a node that was not verified is known only where that node failed. Had it come true,
//   the tokens would end with it. So it would only ever count as a miss, and is left out.
//
// A path is learned from every child of the first kind, a step only where the parent came true.
// Where tokens come that were not drafted for, they decide as many steps as there are tokens.
//
// Whether the guess itself was verified does not matter, so an estimate that sank too low for
// verification can rise again. Nodes may be chosen for verification by these estimates, because
// they are chosen before the tokens are known.
//
// One small bias is accepted. Where a rollout ends, its tokens may stop early: guesses below the
// last one stay unknown, while misses beside it are counted.
std::size_t Sequence::judge(std::span<const Token> tokens, std::size_t verified,
                            Calibration& calibration) {
  std::uint64_t accepted = 1;  // bit i: tree node i came true, the root included
  std::uint64_t unknown = 0;   // bit i: the tokens end before tree node i
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
    if (guess.parent <= verified) calibration.observe_path(guess.product, guess.depth, right);
  }
  guesses.clear();
  drafted = 0;
  return static_cast<std::size_t>(std::popcount(accepted)) - 1;
}

}  // namespace ngram
