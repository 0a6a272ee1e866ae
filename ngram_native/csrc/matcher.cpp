#include "matcher.h"

#include <algorithm>
#include <array>
#include <utility>

namespace ngram {

namespace {

enum LiveChain : std::uint32_t { kGroupLong, kGroupShort, kLiveLong, kLiveShort };

// The weight of an occurrence by its source.
constexpr double kScopeWeight[kNumSources] = {1.0, 0.2, 0.2, 1.0};

constexpr double kAging = 0.15;  // per change of policy

// The wider scopes give at least this many occurrences.
constexpr std::uint32_t kMinWider = 6;

// Outside the group a single token of context predicts nothing.
constexpr std::uint32_t kMinExternalMatch = 2;

// With this many long contexts in the group, other rollouts are not searched.
constexpr std::size_t kPlenty = 8;

constexpr std::uint32_t kMostGaps = 8;
// An occurrence across a gap weighs as much as one that shares this many tokens.
constexpr std::uint32_t kGapMatch = 2;

// The weight of an occurrence by the length of its match. Each further token of context doubles it,
// up to a point: long contexts decide and short ones break ties.
constexpr std::array<double, kMaxMatch + 1> make_match_weights() {
  std::array<double, kMaxMatch + 1> weights{};
  double weight = 1.0;
  for (std::uint32_t match = 0; match <= kMaxMatch; ++match) {
    weights[match] = weight;
    weight *= match < 12 ? 2.0 : 1.05;
  }
  return weights;
}

constexpr std::array<double, kMaxMatch + 1> kMatchWeights = make_match_weights();

}  // namespace

const std::vector<Chain>& Matcher::live_chains() {
  static const std::vector<Chain> chains = {{4, true}, {1, true}, {5, false}, {2, false}};
  return chains;
}

Matcher::Search& Matcher::add_search(const ChainedLog& chained, const Query& query, Source source,
                                     std::uint32_t chain, std::uint32_t last_chain) {
  if (num_searches_ == searches_.size()) searches_.emplace_back();
  Search& search = searches_[num_searches_++];
  search.chained = &chained;
  search.context = query.context;
  search.group = query.group;
  search.source = source;
  search.chain = chain;
  search.last_chain = last_chain;
  search.most = max_candidates_;
  search.max_steps = max_steps_;
  search.shorter_than = kMaxMatch + 1;
  search.found.clear();
  return search;
}

// Enters the first chain, from search.chain on, for which the context is long enough. False when
// none is left.
bool Matcher::enter_chain(Search& search) const {
  const ChainedLog& chained = *search.chained;
  while (search.context.size() < chained.chains()[search.chain].order) {
    if (search.chain++ == search.last_chain) return false;
  }
  search.steps = 0;
  search.at_head = true;
  search.slot = chained.slot(search.chain, search.context, search.group);
  chained.prefetch_head(search.slot);
  return true;
}

// Looks at search.position and moves to the next one. False at the chain's end.
bool Matcher::visit(Search& search) const {
  const ChainedLog& chained = *search.chained;
  const std::uint32_t offset = search.position % kPageTokens;
  const PageView page = chained.log().view(search.position / kPageTokens);
  const PageHeader& header = page.header();
  if (header.number != search.position / kPageTokens || offset >= header.used) return false;
  const Chain chain = chained.chains()[search.chain];
  const Position position = search.position;
  search.position = *page.link(offset, search.chain);
  const bool in_group = header.has_group && header.group == search.group;
  if (chain.per_group ? !in_group : (search.source == Source::kLive && in_group)) return true;
  const std::uint32_t match = chained.match_length(page, offset, search.context);
  if (match < chain.order || match >= search.shorter_than) return true;
  search.found.push_back(Found{position, match, header.policy});
  return true;
}

bool Matcher::step(Search& search) const {
  const ChainedLog& chained = *search.chained;
  bool goes_on = true;
  if (search.at_head) {
    search.at_head = false;
    search.position = chained.head(search.slot);
  } else {
    goes_on = visit(search);
    if (search.found.size() == search.most) return false;
  }
  if (goes_on && search.steps++ < search.max_steps &&
      chained.prefetch(search.position, search.chain)) {
    return true;
  }
  if (search.chain == search.last_chain) return false;
  search.shorter_than = chained.chains()[search.chain++].order;
  return enter_chain(search);
}

void Matcher::run(std::size_t first) {
  running_.clear();
  for (std::size_t i = first; i < num_searches_; ++i) {
    if (enter_chain(searches_[i])) running_.push_back(&searches_[i]);
  }
  while (!running_.empty()) {
    for (std::size_t i = 0; i < running_.size();) {
      if (step(*running_[i])) {
        ++i;
      } else {
        running_[i] = running_.back();
        running_.pop_back();
      }
    }
  }
}

std::size_t Matcher::num_long(const Search& group_search) {
  const std::uint32_t order = live_chains()[kGroupLong].order;
  const auto& found = group_search.found;
  return static_cast<std::size_t>(std::count_if(
      found.begin(), found.end(), [order](const Found& f) { return f.match >= order; }));
}

void Matcher::add_candidates(const Search& search, std::uint32_t policy, Candidates& out) const {
  const TokenLog& log = search.chained->log();
  const bool gap = search.source == Source::kGap;
  for (const Found& found : search.found) {
    const Position next = gap ? log.after(found.position) : found.position;
    if (next == kNoPosition) continue;
    const std::uint32_t length = log.read(next, out.depth(), out.room());
    const double age = policy - found.policy;
    const double weight = kScopeWeight[static_cast<std::size_t>(search.source)] *
                          kMatchWeights[gap ? kGapMatch : found.match] / (1.0 + kAging * age);
    out.add(Candidate{found.match, length, search.source, weight});
  }
}

std::uint32_t Matcher::wider_most(const Search& group_search) const {
  const auto held = static_cast<std::uint32_t>(group_search.found.size());
  return std::min(max_candidates_, max_candidates_ - held + kMinWider);
}

void Matcher::add_external(const ExternalCorpora& externals, ContextView context,
                           std::uint32_t most, Candidates& out) {
  constexpr auto kSource = static_cast<std::size_t>(Source::kExternal);
  for (const auto& [name, external] : externals.by_name()) {
    external->find(context, most, occurrences_);
    for (const Occurrence& occurrence : occurrences_) {
      if (occurrence.match < kMinExternalMatch) break;
      Token* const tokens = out.room();
      std::uint32_t length = 0;
      while (length < out.depth() && occurrence.next[length] >= 0) {
        tokens[length] = occurrence.next[length];
        ++length;
      }
      out.add(Candidate{occurrence.match, length, Source::kExternal,
                        kScopeWeight[kSource] * kMatchWeights[occurrence.match]});
    }
  }
}

std::span<const Candidates> Matcher::gather(const Scopes& scopes, std::span<const Query> queries,
                                            std::uint32_t depth) {
  num_searches_ = 0;
  for (const Query& query : queries) {
    add_search(scopes.live, query, Source::kGroup, kGroupLong, kGroupShort);
  }
  run(0);
  first_wider_.clear();
  for (std::size_t q = 0; q < queries.size(); ++q) {
    const std::size_t held_long = num_long(searches_[q]);
    const std::uint32_t most = wider_most(searches_[q]);
    first_wider_.push_back(num_searches_);
    if (held_long < kPlenty) {
      Search& search = add_search(scopes.live, queries[q], Source::kLive, kLiveLong, kLiveShort);
      search.most = most;
      search.max_steps = static_cast<std::uint32_t>(
          (std::uint64_t{max_steps_} * most + max_candidates_ - 1) / max_candidates_);
    }
    if (held_long == 0 && queries[q].context.size() > live_chains()[kGroupLong].order) {
      const Query before{queries[q].context.without_last(), queries[q].group};
      add_search(scopes.live, before, Source::kGap, kGroupLong, kGroupLong).most = kMostGaps;
    }
  }
  first_wider_.push_back(num_searches_);
  run(queries.size());
  if (candidates_.size() < queries.size()) candidates_.resize(queries.size());
  for (std::size_t q = 0; q < queries.size(); ++q) {
    candidates_[q].clear(depth);
    add_candidates(searches_[q], scopes.policy, candidates_[q]);
    for (std::size_t i = first_wider_[q]; i < first_wider_[q + 1]; ++i) {
      add_candidates(searches_[i], scopes.policy, candidates_[q]);
    }
    add_external(scopes.externals, queries[q].context, wider_most(searches_[q]), candidates_[q]);
  }
  return {candidates_.data(), queries.size()};
}

std::uint64_t Matcher::num_bytes() const {
  std::uint64_t bytes =
      searches_.capacity() * sizeof(Search) + running_.capacity() * sizeof(Search*) +
      first_wider_.capacity() * sizeof(std::size_t) + occurrences_.capacity() * sizeof(Occurrence) +
      candidates_.capacity() * sizeof(Candidates);
  for (const Search& search : searches_) bytes += search.found.capacity() * sizeof(Found);
  for (const Candidates& candidates : candidates_) bytes += candidates.num_bytes();
  return bytes;
}

}  // namespace ngram
