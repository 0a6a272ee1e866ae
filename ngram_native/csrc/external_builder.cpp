#include "external_builder.h"

#include <algorithm>
#include <utility>

#include "validation.h"

namespace ngram {

ExternalBuilder::ExternalBuilder(std::shared_ptr<ExternalBudget> budget)
    : monitor_(std::move(budget)) {}

void ExternalBuilder::append(std::span<const Token> tokens, std::span<const std::int64_t> offsets) {
  check_tokens(tokens);
  if (offsets.empty()) refuse("len(offsets)", "0", "must be at least 1");
  check_offsets(offsets, offsets.size() - 1, tokens.size());
  const std::scoped_lock lock(mutex_);
  if (closed_)
    refuse("documents", std::to_string(offsets.size() - 1), "cannot be added after build()");
  const std::uint64_t size = text_size_ + tokens.size() + offsets.size();
  if (size > ExternalIndex::kMaxText) {
    refuse("documents", std::to_string(size) + " tokens and documents",
           "are more than the " + std::to_string(ExternalIndex::kMaxText) +
               " one corpus can index; split it");
  }
  monitor_.hold(MappedArray<Token>::bytes_for(size));
  if (text_size_ == 0) push(ExternalIndex::kSeparator);
  for (std::size_t d = 0; d + 1 < offsets.size(); ++d) {
    if (offsets[d] == offsets[d + 1]) continue;
    for (std::int64_t i = offsets[d]; i < offsets[d + 1]; ++i) {
      push(tokens[static_cast<std::size_t>(i)]);
    }
    push(ExternalIndex::kSeparator);
  }
  num_tokens_ += tokens.size();
}

void ExternalBuilder::push(Token token) {
  if (text_size_ % kChunk == 0) chunks_.emplace_back(kChunk);
  chunks_.back()[text_size_++ % kChunk] = token;
}

MappedArray<Token> ExternalBuilder::joined() {
  if (text_size_ == 0) push(ExternalIndex::kSeparator);
  MappedArray<Token> text(text_size_);
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    monitor_.checkpoint();
    const std::size_t begin = c * kChunk;
    std::copy_n(chunks_[c].data(), std::min(kChunk, text_size_ - begin), text.data() + begin);
    chunks_[c] = {};  // so that the text is never held twice
  }
  chunks_.clear();
  return text;
}

bool ExternalBuilder::build(const std::function<bool()>& proceed) {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(closed_, true)) refuse("build", "called twice", "make another builder");
  monitor_.ask(proceed);
  try {
    index_ = std::make_unique<ExternalIndex>(joined(), monitor_);
    built_ = true;
  } catch (const BuildCancelled&) {
    release();
  } catch (...) {
    release();
    throw;
  }
  monitor_.ask({});
  return built_;
}

void ExternalBuilder::free() {
  const std::scoped_lock lock(mutex_);
  closed_ = true;
  built_ = false;
  release();
}

void ExternalBuilder::release() {
  chunks_.clear();
  index_.reset();
  monitor_.ask({});
  monitor_.hold(0);
}

double ExternalBuilder::fraction_indexed() const {
  if (built_) return 1.0;
  const auto tokens = static_cast<double>(num_tokens());
  return tokens == 0 ? 0.0 : std::min(1.0, static_cast<double>(monitor_.indexed()) / tokens);
}

std::unique_ptr<ExternalIndex> ExternalBuilder::take() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !built_.exchange(false)) {
    refuse("builder", "not built", "build() it first; it can be published once");
  }
  return std::move(index_);
}

}  // namespace ngram
