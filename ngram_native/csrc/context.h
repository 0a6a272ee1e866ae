// The last tokens of a sequence, and the hashes that name a context of each order.
#ifndef NGRAM_NATIVE_CONTEXT_H_
#define NGRAM_NATIVE_CONTEXT_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <span>

#include "types.h"

namespace ngram {

inline constexpr std::uint64_t kHashSeed = 0xD1B54A32D192ED03ull;

inline std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// A view of the tokens before an address; valid as long as that memory is.
class ContextView {
 public:
  ContextView(const Token* end, std::uint32_t size) : end_(end), size_(size) {}

  const Token* end() const { return end_; }  // one past the last: size() tokens lie before it
  std::uint32_t size() const { return size_; }
  Token back(std::uint32_t distance) const {  // 0: the last
    return end_[-1 - static_cast<std::int32_t>(distance)];
  }
  ContextView without_last() const { return {end_ - 1, size_ - 1}; }

  // Hash of the last `order` tokens; requires order <= size(). A longer context's hash goes on from
  // a shorter one's.
  std::uint64_t hash(std::uint32_t order) const { return hash(order, 0, kHashSeed); }
  std::uint64_t hash(std::uint32_t order, std::uint32_t from, std::uint64_t hash) const {
    for (std::uint32_t i = from; i < order; ++i) {
      hash = mix(hash, static_cast<std::uint32_t>(back(i)));
    }
    return hash;
  }

 private:
  const Token* end_;
  std::uint32_t size_;
};

// A sliding window over the last kMaxMatch tokens.
class Context {
 public:
  void push(Token token) {
    if (end_ == buffer_.size()) {
      std::memmove(buffer_.data(), buffer_.data() + kMaxMatch, kMaxMatch * sizeof(Token));
      end_ = kMaxMatch;
    }
    buffer_[end_++] = token;
    if (size_ < kMaxMatch) ++size_;
  }

  void push(std::span<const Token> tokens) {
    const std::size_t skipped = tokens.size() > kMaxMatch ? tokens.size() - kMaxMatch : 0;
    for (const Token token : tokens.subspan(skipped)) push(token);
  }

  ContextView view() const { return {buffer_.data() + end_, size_}; }

 private:
  std::array<Token, 2 * kMaxMatch> buffer_;
  std::uint32_t end_ = 0;
  std::uint32_t size_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CONTEXT_H_
