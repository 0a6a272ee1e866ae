#include "sequence.h"

#include <bit>

namespace ngram {

// Whether a guess is learned from must not depend on whether it came true.
//
// The tokens are a path of verified nodes that came true and what the target sampled after its last
// one. So a node below the root or a verified node is decided: its parent did not come true, or the
// target sampled a token after it. A node below one that was not verified is decided only when that
// did not come true, and then it is a miss; had it come true, the tokens would end there. (Where a
// rollout ends the tokens may be fewer: what would have come below the last one is undecided, while
// misses beside it are seen. That happens once a rollout, and is let be.)
//
// Paths: only nodes of the first kind are learned from; the others would only ever be misses.
//
// Steps: only nodes whose parent came true are learned from, which leaves those of the second kind
// out as undecided. Where tokens come that were not drafted for, as many steps are decided as there
// are tokens, right or wrong.
//
// Whether the node itself was verified does not matter: estimates that sank too low for it can rise
// again. The choice of what is verified may rest on the estimates, as it is made before the tokens
// are known.
std::size_t Sequence::judge(std::span<const Token> tokens, std::size_t verified,
                            Calibration& calibration) {
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
    if (guess.parent <= verified) calibration.observe_path(guess.product, guess.depth, right);
  }
  guesses.clear();
  drafted = 0;
  return static_cast<std::size_t>(std::popcount(accepted)) - 1;
}

}  // namespace ngram
