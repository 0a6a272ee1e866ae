// Types and constants that every file here shares.
#ifndef NGRAM_NATIVE_TYPES_H_
#define NGRAM_NATIVE_TYPES_H_

#include <cstdint>

namespace ngram {

using Token = std::int32_t;

// Where a token is in a log: page number * kPageTokens + offset. A page number is a slot and a
// count of how often the slot was filled, so a position of a dropped page is recognised as stale.
using Position = std::uint32_t;
using PageNumber = std::uint32_t;

inline constexpr Position kNoPosition = 0xFFFFFFFFu;
inline constexpr PageNumber kNoPage = 0xFFFFFFFFu;

inline constexpr std::uint32_t kPageTokens = 32;

// The longest context compared. A longer match predicts no better.
inline constexpr std::uint32_t kMaxMatch = 32;

// Nodes of one tree, root included: an ancestor mask is one 64-bit word.
inline constexpr std::int32_t kMaxTreeNodes = 64;

}  // namespace ngram

#endif  // NGRAM_NATIVE_TYPES_H_
