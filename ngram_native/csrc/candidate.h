// Earlier occurrences of a context, as evidence for what comes next.
#ifndef NGRAM_NATIVE_CANDIDATE_H_
#define NGRAM_NATIVE_CANDIDATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace ngram {

// Where an occurrence was found, the most informative source first.
enum class Source : std::uint8_t {
  kGroup,     // the samples of this prompt
  kLive,      // other rollouts
  kExternal,  // an external corpus
  kGap,       // a sample of this prompt that differs in the last token alone
};
inline constexpr std::size_t kNumSources = 4;

struct Candidate {
  std::uint32_t match;   // tokens of context shared with the query; kGap: before the last one
  std::uint32_t length;  // how many tokens are known to have followed there, 1 or more
  Source source;
  double weight;  // by its match, age and scope
};

// The candidates of one query and the tokens that followed them, copied side by side. A tree is
// then grown from a few kilobytes of cached memory, whatever scope the tokens come from.
class Candidates {
 public:
  // Begins anew, for trees no deeper than `depth`.
  void clear(std::uint32_t depth) {
    depth_ = depth;
    candidates_.clear();
  }

  // Room for the next candidate's continuation, to be filled before add(): depth() tokens, and
  // kSpare more, which a copy in whole vectors may overwrite.
  static constexpr std::size_t kSpare = 4;
  Token* room() {
    const std::size_t needed = (candidates_.size() + 1) * depth_ + kSpare;
    if (tokens_.size() < needed) tokens_.resize(2 * needed);
    return tokens_.data() + candidates_.size() * depth_;
  }
  void add(const Candidate& candidate) { candidates_.push_back(candidate); }

  std::uint64_t num_bytes() const {
    return candidates_.capacity() * sizeof(Candidate) + tokens_.capacity() * sizeof(Token);
  }
  std::uint32_t depth() const { return depth_; }
  std::size_t size() const { return candidates_.size(); }
  const Candidate* data() const { return candidates_.data(); }
  // Candidate i's continuation begins at i * depth().
  const Token* continuations() const { return tokens_.data(); }

 private:
  std::uint32_t depth_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<Token> tokens_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CANDIDATE_H_
