// A byte string read as decisions.
#ifndef NGRAM_NATIVE_TESTS_FUZZ_INPUT_H_
#define NGRAM_NATIVE_TESTS_FUZZ_INPUT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "types.h"

namespace ngram::fuzz {

// Reads zeros when the string is used up, so every string means something.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }

  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const std::uint8_t value = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return value;
  }

  template <typename Integer>
  Integer integer() {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(Integer); ++i) value = value << 8 | byte();
    return static_cast<Integer>(value);
  }

  // In [0, end), end at most 256.
  std::uint32_t below(std::size_t end) { return byte() % static_cast<std::uint32_t>(end); }

  template <typename T, std::size_t kSize>
  T pick(const std::array<T, kSize>& choices) {
    return choices[below(kSize)];
  }

  // At most `most` tokens, of four ids, so that contexts come again.
  std::vector<Token> tokens(std::size_t most) {
    constexpr Token kTop = std::numeric_limits<Token>::max();
    constexpr std::array<Token, 4> kTokens = {0, 1, kTop, kTop - 1};
    std::vector<Token> tokens(below(most + 1));
    // Two bits a token; a short string may still say much.
    for (std::size_t i = 0, bits = 0; i < tokens.size(); ++i, bits >>= 2) {
      if (i % 4 == 0) bits = byte();
      tokens[i] = kTokens[bits % 4];
    }
    return tokens;
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace ngram::fuzz

#endif  // NGRAM_NATIVE_TESTS_FUZZ_INPUT_H_
