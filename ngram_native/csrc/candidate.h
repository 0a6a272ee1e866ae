// Earlier occurrences of a context, as evidence for what comes next.
#ifndef NGRAM_NATIVE_CANDIDATE_H_
#define NGRAM_NATIVE_CANDIDATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "types.h"

namespace ngram {

// Where it was found, the most informative source first.
enum class Source : std::uint8_t {
  kGroup,     // the samples of this prompt
  kLive,      // other rollouts
  kExternal,  // an external corpus
  kGap,       // a sample of this prompt that agrees up to the last token, which is another there
};
inline constexpr std::size_t kNumSources = 4;

struct Candidate {
  std::uint32_t match;   // tokens of context it shares with the query; of kGap, before the last
  std::uint32_t length;  // tokens known to have come next there, 1 or more
  Source source;
  double weight;  // of its match, age and scope
};

// The candidates of one query with the tokens that came next, copied side by side: a tree is grown
// from a few kilobytes of near memory, whatever scope they come from.
class Candidates {
 public:
  // For trees no deeper than `depth`.
  void clear(std::uint32_t depth) {
    depth_ = depth;
    candidates_.clear();
  }

  // Room for the next candidate's continuation: depth() tokens, and kSpare more that a hasty copy
  // may spoil; to be filled before add().
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
  // Of candidate i from i * depth() on.
  const Token* continuations() const { return tokens_.data(); }

 private:
  std::uint32_t depth_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<Token> tokens_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CANDIDATE_H_
