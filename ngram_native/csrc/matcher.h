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

// What a query looks into.
struct Scopes {
  const ChainedLog& live;
  const ExternalCorpora& externals;
  std::uint32_t policy;  // the current one
};

struct Query {
  ContextView context;
  std::uint64_t group;
};

// Per scope the most recent occurrences of its long chain's order, filled up with shorter ones from
// its short chain: up to max_candidates of the group, of the wider scopes what is left of that and
// some in any case. Where the group knows no long context, the last token may be the odd one:
// occurrences of the context before it are candidates too, as if their own next token were ours.
//
// This is a function of scopes and context alone: nothing is carried from query to query, so a
// sequence that jumped, lost pages or was opened anew finds the same. Carrying survivors over would
// spare comparing tokens, but what a walk waits for is the memory of occurrences it has not seen
// yet; so the walks of several queries wait together.
class Matcher {
 public:
  Matcher(std::uint32_t max_candidates, std::uint32_t max_steps)
      : max_candidates_(max_candidates), max_steps_(max_steps) {}

  // Chains of the live log. The group is the narrower scope, so a shorter context already tells
  // something there.
  static const std::vector<Chain>& live_chains();

  // Candidates of each query, for trees of that depth; valid until the next call.
  std::span<const Candidates> gather(const Scopes& scopes, std::span<const Query> queries,
                                     std::uint32_t depth);

  std::uint64_t num_bytes() const;  // reused between calls

 private:
  struct Found {
    Position position;  // of the token that came next
    std::uint32_t match;
    std::uint32_t policy;
  };

  // A search of one scope for one query, advanced a link at a time so that many can wait for their
  // memory together.
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
  void run(std::size_t first);  // the searches from `first` on, together
  bool enter_chain(Search& search) const;
  bool step(Search& search) const;   // false when the search is over
  bool visit(Search& search) const;  // false when the chain is over
  // Occurrences found that share a context of the long chain's order.
  static std::size_t num_long(const Search& group_search);
  // Occurrences wanted of each wider scope.
  std::uint32_t wider_most(const Search& group_search) const;
  void add_candidates(const Search& search, std::uint32_t policy, Candidates& out) const;
  void add_external(const ExternalCorpora& externals, ContextView context, std::uint32_t most,
                    Candidates& out);

  const std::uint32_t max_candidates_;
  const std::uint32_t max_steps_;
  std::vector<Search> searches_;  // the first num_searches_ are in use; the rest are reused
  std::size_t num_searches_ = 0;
  std::vector<Search*> running_;
  std::vector<std::size_t> first_wider_;  // by query, its searches beside the group's
  std::vector<Occurrence> occurrences_;
  std::vector<Candidates> candidates_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_MATCHER_H_
