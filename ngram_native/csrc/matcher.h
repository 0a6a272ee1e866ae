// Finds, in every scope, the earlier occurrences of what sequences said last.
#ifndef NGRAM_NATIVE_MATCHER_H_
#define NGRAM_NATIVE_MATCHER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "candidate.h"
#include "chained_log.h"
#include "context.h"
#include "external_corpora.h"
#include "types.h"

namespace ngram {

// What a query looks into.
struct Scopes {
  const ChainedLog& live;
  const ExternalCorpora& externals;
  std::uint32_t policy;  // the current one
};

struct Query {
  const Context* context;
  std::uint64_t group;
};

// Per scope the max_candidates most recent occurrences of its long chain's order, filled up with
// shorter ones from its short chain. This is a function of scopes and context alone: nothing is
// carried from query to query, so a sequence that jumped, lost pages or was opened anew finds the
// same. Carrying survivors over would spare comparing tokens, but what a walk waits for is the
// memory of occurrences it has not seen yet; so the walks of several queries wait together.
class Matcher {
 public:
  Matcher(std::uint32_t max_candidates, std::uint32_t max_steps)
      : max_candidates_(max_candidates), max_steps_(max_steps) {}

  // Chains of the live log. The group is the narrower scope, so a shorter context already tells
  // something there.
  static const std::vector<Chain>& live_chains();

  // Candidates of each query; valid until the next call.
  std::span<const std::vector<Candidate>> gather(const Scopes& scopes,
                                                 std::span<const Query> queries);

 private:
  // A search of one scope for one query, advanced a link at a time so that many can wait for their
  // memory together.
  struct Search {
    const ChainedLog* chained;
    Query query;
    std::uint32_t chain;  // under way
    std::uint32_t last_chain;
    Source source;
    std::uint32_t policy;
    bool outside_group;  // leaves the group's own occurrences to the group's search
    std::size_t slot;    // of the chain's head, while it is being fetched
    bool at_head;
    Position position;  // being fetched
    std::uint32_t steps;
    std::uint32_t shorter_than;  // longer matches were the long chain's
    std::vector<Candidate> found;
  };

  Search& add_search();
  void begin_chain(Search& search) const;
  bool step(Search& search) const;  // false when the search is over
  bool visit(Search& search) const;

  const std::uint32_t max_candidates_;
  const std::uint32_t max_steps_;  // links followed per chain
  std::vector<Search> searches_;   // the first num_searches_ are in use; the rest keep memory
  std::size_t num_searches_ = 0;
  std::vector<Search*> running_;
  std::vector<std::vector<Candidate>> candidates_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_MATCHER_H_
