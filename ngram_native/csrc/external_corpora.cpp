#include "external_corpora.h"

#include <algorithm>
#include <utility>

#include "validation.h"

namespace ngram {

namespace {

struct Size {
  std::uint64_t pages;
  std::uint32_t part_slots;
};

Size size_of(std::span<const std::int64_t> offsets) {
  std::uint64_t pages = 1;
  for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
    const auto length = static_cast<std::uint64_t>(offsets[d + 1] - offsets[d]);
    pages += (length + kPageTokens - 1) / kPageTokens;
  }
  // A slot per token and chain: unlike the rollouts, most contexts here come once.
  const auto slots = std::min<std::uint64_t>(pages * kPageTokens, 1u << 28);
  return {pages, static_cast<std::uint32_t>(slots)};
}

}  // namespace

const std::vector<Chain>& ExternalCorpora::chains() {
  static const std::vector<Chain> chains = {{5, false}, {2, false}};
  return chains;
}

std::uint64_t ExternalCorpora::bytes_needed(std::span<const std::int64_t> offsets) {
  const Size size = size_of(offsets);
  return size.pages * TokenLog::page_bytes(static_cast<std::uint32_t>(chains().size())) +
         ChainedLog::table_bytes(chains(), size.part_slots);
}

std::unique_ptr<ChainedLog> ExternalCorpora::build(std::span<const Token> tokens,
                                                   std::span<const std::int64_t> offsets) {
  const Size size = size_of(offsets);
  if (size.pages > TokenLog::kMaxCapacityPages) {
    refuse("len(tokens)", std::to_string(tokens.size()), "is more than one corpus can index");
  }
  auto corpus = std::make_unique<ChainedLog>(chains(), static_cast<std::uint32_t>(size.pages),
                                             size.part_slots);
  for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
    Cursor cursor;
    Context context;
    for (std::int64_t i = offsets[d]; i < offsets[d + 1]; ++i) {
      const Token token = tokens[static_cast<std::size_t>(i)];
      corpus->append(cursor, token, context, 0);
      context.push(token);
    }
  }
  return corpus;
}

void ExternalCorpora::admit(const std::string& name, std::uint64_t bytes) const {
  if (by_name_.contains(name)) {
    refuse("name", "'" + name + "'", "is loaded already; remove_external() it first");
  }
  const std::uint64_t held = num_bytes();
  if (bytes > max_bytes_ - std::min(held, max_bytes_)) {
    refuse(
        "documents", std::to_string(bytes) + " bytes",
        "do not fit beside the " + std::to_string(held) +
            " bytes of other external corpora in max_external_bytes=" + std::to_string(max_bytes_));
  }
}

void ExternalCorpora::add(const std::string& name, std::unique_ptr<ChainedLog> corpus) {
  by_name_.emplace(name, std::move(corpus));
}

std::unique_ptr<ChainedLog> ExternalCorpora::remove(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) refuse("name", "'" + name + "'", "is not loaded");
  auto removed = std::move(found->second);
  by_name_.erase(found);
  return removed;
}

std::vector<std::string> ExternalCorpora::names() const {
  std::vector<std::string> names;
  for (const auto& [name, corpus] : by_name_) names.push_back(name);
  return names;
}

std::uint64_t ExternalCorpora::num_tokens() const {
  std::uint64_t tokens = 0;
  for (const auto& [name, corpus] : by_name_) tokens += corpus->log().num_tokens();
  return tokens;
}

std::uint64_t ExternalCorpora::num_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, corpus] : by_name_) bytes += corpus->num_bytes();
  return bytes;
}

}  // namespace ngram
