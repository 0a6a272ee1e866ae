// Finds, in every scope, earlier occurrences of the last tokens of sequences.
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
#include "external_index.h"
#include "types.h"

namespace ngram {

// What a query searches.
struct Scopes {
  const ChainedLog& live;
  const ExternalCorpora& externals;
  std::uint32_t policy;  // the current one
};

struct Query {
  ContextView context;
  std::uint64_t group;
};

// In each scope it takes the most recent occurrences of the context of the long chain's order, then
// shorter ones from the short chain. The group gives up to max_candidates; the wider scopes give
// what is left of that number, and a few in any case. Where the group has no long context, the last
// token may be a substitution: occurrences of the context before it are candidates too, and are
// read on as if their next token were that token.
//
// The result depends on scopes and context alone. Nothing is carried from query to query, so a
// sequence that jumped, lost pages or was opened again finds the same. Carrying occurrences over
// would save comparing tokens, but a walk spends its time on cache misses for occurrences that it
// has not seen yet. So the walks of several queries run together and their misses overlap.
class Matcher {
 public:
  Matcher(std::uint32_t max_candidates, std::uint32_t max_steps)
      : max_candidates_(max_candidates), max_steps_(max_steps) {}

  // Chains of the live log. The group is the narrower scope, so shorter contexts are worth
  // following there.
  static const std::vector<Chain>& live_chains();

  // The candidates of each query, for trees of at most that depth. Valid until the next call.
  std::span<const Candidates> gather(const Scopes& scopes, std::span<const Query> queries,
                                     std::uint32_t depth);

  std::uint64_t num_bytes() const;  // reused between calls

 private:
  struct Found {
    Position position;  // of the token that came next
    std::uint32_t match;
    std::uint32_t policy;
  };

  // A search of one scope for one query. It advances one link at a time, so that the cache misses
  // of many searches overlap.
  struct Search {
    const ChainedLog* chained = nullptr;
    ContextView context{nullptr, 0};
    std::uint64_t group = 0;
    Source source = Source::kGroup;
    std::uint32_t chain = 0;  // under way
    std::uint32_t last_chain = 0;
    std::uint32_t most = 0;          // occurrences wanted
    std::uint32_t max_steps = 0;     // links followed per chain
    std::uint32_t shorter_than = 0;  // longer matches were the long chain's
    bool at_head = false;
    std::size_t slot = 0;             // of the chain's head, while it is being fetched
    Position position = kNoPosition;  // being fetched
    std::uint32_t steps = 0;
    std::vector<Found> found;
  };

  Search& add_search(const ChainedLog& chained, const Query& query, Source source,
                     std::uint32_t chain, std::uint32_t last_chain);
  void run(std::size_t first);  // advances the searches from `first` on together, to their end
  bool enter_chain(Search& search) const;
  bool step(Search& search) const;   // false when the search is over
  bool visit(Search& search) const;  // false when the chain is over
  // How many of the occurrences found share a context of the long chain's order.
  static std::size_t num_long(const Search& group_search);
  // How many occurrences each wider scope should give.
  std::uint32_t wider_most(const Search& group_search) const;
  void add_candidates(const Search& search, std::uint32_t policy, Candidates& out) const;
  void add_external(const ExternalCorpora& externals, ContextView context, std::uint32_t most,
                    Candidates& out);

  const std::uint32_t max_candidates_;
  const std::uint32_t max_steps_;
  std::vector<Search> searches_;  // the first num_searches_ are in use; the rest are reused
  std::size_t num_searches_ = 0;
  std::vector<Search*> running_;
  std::vector<std::size_t> first_wider_;  // by query: the first of its searches of wider scopes
  std::vector<Occurrence> occurrences_;
  std::vector<Candidates> candidates_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_MATCHER_H_
