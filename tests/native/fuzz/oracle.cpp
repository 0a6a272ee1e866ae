#include "oracle.h"

#include <algorithm>

#include "check.h"

namespace ngram::fuzz {

namespace {

// The shortest contexts that are searched for: in the query's own group, and elsewhere.
constexpr std::size_t kShortestInGroup = 1;
constexpr std::size_t kShortestElsewhere = 2;
// Or, in the own group, the tokens before the last one, which is another there.
constexpr std::size_t kBeforeGap = 4;

// Whether the last `shortest` tokens of `text`, then `path`, then at least one token more when the
// path is empty, lie in `tokens` side by side.
bool holds(const std::vector<Token>& tokens, std::span<const Token> text, std::size_t shortest,
           std::span<const Token> path) {
  if (text.size() < shortest) return false;
  std::vector<Token> part(text.end() - static_cast<std::ptrdiff_t>(shortest), text.end());
  part.insert(part.end(), path.begin(), path.end());
  const auto end = path.empty() && !tokens.empty() ? tokens.end() - 1 : tokens.end();
  return std::search(tokens.begin(), end, part.begin(), part.end()) != end;
}

// The same across a gap: so many tokens before the last of `text`, any token, then `path`.
bool holds_across_gap(const std::vector<Token>& tokens, std::span<const Token> text,
                      std::span<const Token> path) {
  if (text.size() <= kBeforeGap) return false;
  const auto before = text.last(kBeforeGap + 1).first(kBeforeGap);
  const std::size_t rest = 1 + std::max<std::size_t>(path.size(), 1);
  for (std::size_t at = 0; at + kBeforeGap + rest <= tokens.size(); ++at) {
    const auto place = tokens.begin() + static_cast<std::ptrdiff_t>(at);
    if (std::equal(before.begin(), before.end(), place) &&
        std::equal(path.begin(), path.end(), place + kBeforeGap + 1)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void Oracle::insert(std::span<const Token> tokens, std::optional<std::uint64_t> group) {
  said_.documents.push_back({group, {tokens.begin(), tokens.end()}});
  said_.num_tokens += tokens.size();
}

void Oracle::open(std::int64_t id, std::uint64_t group, std::span<const Token> tokens) {
  std::ptrdiff_t held = 0;
  for (const Said::Document& document : said_.documents) {
    if (document.group != group) continue;
    const auto [end, unused] =
        std::mismatch(tokens.begin(), tokens.end(), document.tokens.begin(), document.tokens.end());
    held = std::max(held, end - tokens.begin());
  }
  insert(tokens, group);
  said_.num_tokens -= static_cast<std::uint64_t>(held);
  sequences_[id] = {group, {tokens.begin(), tokens.end()}, said_.documents.size() - 1};
}

void Oracle::extend(std::int64_t id, std::span<const Token> tokens) {
  if (tokens.empty()) return;
  Sequence& sequence = sequences_.at(id);
  sequence.drafted = 0;
  if (sequence.document == kNone) {
    sequence.document = said_.documents.size();
    said_.documents.push_back({sequence.group, {}});
  }
  std::vector<Token>& document = said_.documents[sequence.document].tokens;
  document.insert(document.end(), tokens.begin(), tokens.end());
  sequence.text.insert(sequence.text.end(), tokens.begin(), tokens.end());
  said_.num_tokens += tokens.size();
}

void Oracle::add_external(const std::string& name, std::span<const Token> tokens,
                          std::span<const std::int64_t> offsets) {
  auto& documents = said_.externals[name];
  for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
    documents.push_back(
        {std::nullopt, {tokens.begin() + offsets[d], tokens.begin() + offsets[d + 1]}});
  }
}

void Oracle::reset() {
  said_.documents.clear();
  said_.num_tokens = 0;
  detach_sequences();
}

void Oracle::load(const Said& said) {
  said_ = said;
  detach_sequences();
}

void Oracle::detach_sequences() {
  for (auto& [id, sequence] : sequences_) sequence.document = kNone;
}

std::uint64_t Oracle::num_tokens() const {
  std::uint64_t tokens = said_.num_tokens;
  for (const auto& [name, documents] : said_.externals) {
    for (const Said::Document& document : documents) tokens += document.tokens.size();
  }
  return tokens;
}

bool Oracle::followed_by(std::uint64_t group, std::span<const Token> text,
                         std::span<const Token> path) const {
  const auto in_live = [&](const Said::Document& document) {
    const bool own = document.group == group;
    return holds(document.tokens, text, own ? kShortestInGroup : kShortestElsewhere, path) ||
           (own && holds_across_gap(document.tokens, text, path));
  };
  const auto in_external = [&](const auto& named) {
    return std::any_of(named.second.begin(), named.second.end(), [&](const auto& document) {
      return holds(document.tokens, text, kShortestElsewhere, path);
    });
  };
  return std::any_of(said_.documents.begin(), said_.documents.end(), in_live) ||
         std::any_of(said_.externals.begin(), said_.externals.end(), in_external);
}

bool Oracle::anything_follows(std::uint64_t group, std::span<const Token> text) const {
  return followed_by(group, text, {});
}

void Oracle::check_seen(const Proposal& proposal, std::size_t entry, std::uint64_t group,
                        std::span<const Token> text) const {
  const auto begin = static_cast<std::size_t>(proposal.offsets[entry]);
  const auto end = static_cast<std::size_t>(proposal.offsets[entry + 1]);
  for (std::size_t j = begin; j < end; ++j) {
    const auto parent_here = static_cast<std::int32_t>(j - begin) + 1;
    const auto* children = proposal.parents.data();
    if (std::find(children + j, children + end, parent_here) != children + end) continue;
    std::vector<Token> path;  // of a leaf; that of an inner node is the beginning of one
    for (std::size_t node = j - begin + 1; node != 0;
         node = static_cast<std::size_t>(proposal.parents[begin + node - 1])) {
      path.push_back(proposal.tokens[begin + node - 1]);
    }
    std::reverse(path.begin(), path.end());
    CHECK(followed_by(group, text, path));
  }
}

}  // namespace ngram::fuzz
