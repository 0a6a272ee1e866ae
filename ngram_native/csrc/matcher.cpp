#include "matcher.h"

#include <utility>

namespace ngram {

namespace {

enum LiveChain : std::uint32_t { kGroupLong, kGroupShort, kLiveLong, kLiveShort };
enum ExternalChain : std::uint32_t { kExternalLong, kExternalShort };

// Of an occurrence, by its scope.
constexpr double kScopeWeight[kNumSources] = {1.0, 0.2, 0.2};

constexpr double kAging = 0.15;  // per change of policy

}  // namespace

const std::vector<Chain>& Matcher::live_chains() {
  static const std::vector<Chain> chains = {{4, true}, {1, true}, {5, false}, {2, false}};
  return chains;
}

Matcher::Search& Matcher::add_search() {
  if (num_searches_ == searches_.size()) searches_.emplace_back();
  Search& search = searches_[num_searches_++];
  search.found.clear();
  return search;
}

void Matcher::begin_chain(Search& search) const {
  search.steps = 0;
  search.at_head = true;
  search.position = kNoPosition;
  if (search.query.context->size() < search.chained->chains()[search.chain].order) {
    search.at_head = false;
    return;
  }
  search.slot = search.chained->slot(search.chain, *search.query.context, search.query.group);
  search.chained->prefetch_head(search.slot);
}

bool Matcher::visit(Search& search) const {
  const TokenLog& log = search.chained->log();
  const PageHeader& page = log.header(search.position / kPageTokens);
  const Chain chain = search.chained->chains()[search.chain];
  const bool in_group = page.has_group && page.group == search.query.group;
  if (chain.per_group ? !in_group : (search.outside_group && in_group)) return true;
  if (search.position % kPageTokens >= page.used) return true;
  const std::uint32_t match = search.chained->match_length(search.position, *search.query.context);
  if (match < chain.order || match >= search.shorter_than) return true;
  const double age = search.policy - page.policy;
  search.found.push_back(
      Candidate{&log, search.position, match, search.source,
                kScopeWeight[static_cast<std::size_t>(search.source)] / (1.0 + kAging * age)});
  return search.found.size() < max_candidates_;
}

bool Matcher::step(Search& search) const {
  const ChainedLog& chained = *search.chained;
  if (search.at_head) {
    search.at_head = false;
    search.position = chained.head(search.slot);
  } else if (search.steps++ < max_steps_ && chained.log().holds(search.position)) {
    if (!visit(search)) return false;
    search.position = chained.log().link(search.position, search.chain);
  } else {
    if (search.chain == search.last_chain) return false;
    search.shorter_than = chained.chains()[search.chain].order;
    ++search.chain;
    begin_chain(search);
    return true;
  }
  chained.prefetch(search.position, search.chain);
  return true;
}

std::span<const std::vector<Candidate>> Matcher::gather(const Scopes& scopes,
                                                        std::span<const Query> queries) {
  num_searches_ = 0;
  const auto add = [&](const ChainedLog& chained, const Query& query, std::uint32_t long_chain,
                       std::uint32_t short_chain, Source source) {
    Search& search = add_search();
    search.chained = &chained;
    search.query = query;
    search.chain = long_chain;
    search.last_chain = short_chain;
    search.source = source;
    search.policy = source == Source::kExternal ? 0 : scopes.policy;
    search.outside_group = source == Source::kLive;
    search.shorter_than = kMaxMatch + 1;
    begin_chain(search);
  };
  for (const Query& query : queries) {
    add(scopes.live, query, kGroupLong, kGroupShort, Source::kGroup);
    add(scopes.live, query, kLiveLong, kLiveShort, Source::kLive);
    for (const auto& [name, external] : scopes.externals.by_name()) {
      add(*external, query, kExternalLong, kExternalShort, Source::kExternal);
    }
  }
  running_.clear();
  for (std::size_t i = 0; i < num_searches_; ++i) running_.push_back(&searches_[i]);
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
  if (candidates_.size() < queries.size()) candidates_.resize(queries.size());
  const std::size_t per_query = queries.empty() ? 0 : num_searches_ / queries.size();
  for (std::size_t q = 0; q < queries.size(); ++q) {
    candidates_[q].clear();
    for (std::size_t i = q * per_query; i < (q + 1) * per_query; ++i) {
      candidates_[q].insert(candidates_[q].end(), searches_[i].found.begin(),
                            searches_[i].found.end());
    }
  }
  return {candidates_.data(), queries.size()};
}

}  // namespace ngram
