// An earlier occurrence of a context, as evidence for what comes next.
#ifndef NGRAM_NATIVE_CANDIDATE_H_
#define NGRAM_NATIVE_CANDIDATE_H_

#include <cstddef>
#include <cstdint>

#include "token_log.h"
#include "types.h"

namespace ngram {

// The scope it was found in, the most telling first.
enum class Source : std::uint8_t { kGroup, kLive, kExternal };
inline constexpr std::size_t kNumSources = 3;

struct Candidate {
  const TokenLog* log;
  Position position;    // of the token that came next there
  std::uint32_t match;  // tokens of context it shares with the query
  Source source;
  double weight;  // of its age and scope
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CANDIDATE_H_
