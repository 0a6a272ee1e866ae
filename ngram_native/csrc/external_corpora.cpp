#include "external_corpora.h"

#include <utility>

#include "validation.h"

namespace ngram {

void ExternalCorpora::check_free(const std::string& name) const {
  if (by_name_.contains(name)) {
    refuse("name", "'" + name + "'", "is loaded already; remove_external() it first");
  }
}

void ExternalCorpora::add(const std::string& name, std::unique_ptr<ExternalIndex> corpus) {
  by_name_.emplace(name, std::move(corpus));
}

std::unique_ptr<ExternalIndex> ExternalCorpora::remove(const std::string& name) {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) refuse("name", "'" + name + "'", "is not loaded");
  auto removed = std::move(found->second);
  by_name_.erase(found);
  return removed;
}

void ExternalCorpora::charge_to(const std::shared_ptr<ExternalBudget>& budget) {
  for (auto& [name, corpus] : by_name_) corpus->charge_to(budget);
}

std::vector<std::string> ExternalCorpora::names() const {
  std::vector<std::string> names;
  for (const auto& [name, corpus] : by_name_) names.push_back(name);
  return names;
}

std::uint64_t ExternalCorpora::num_tokens() const {
  std::uint64_t tokens = 0;
  for (const auto& [name, corpus] : by_name_) tokens += corpus->num_tokens();
  return tokens;
}

std::uint64_t ExternalCorpora::num_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, corpus] : by_name_) bytes += corpus->num_bytes();
  return bytes;
}

}  // namespace ngram
