// Where in a fixed text a context occurred, the longest match first.
#ifndef NGRAM_NATIVE_EXTERNAL_INDEX_H_
#define NGRAM_NATIVE_EXTERNAL_INDEX_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "build_monitor.h"
#include "context.h"
#include "context_sorter.h"
#include "mapped_array.h"
#include "types.h"

namespace ngram {

// An earlier occurrence of the end of a context.
struct Occurrence {
  const Token* next;    // the token that came next; read on until a negative one
  std::uint32_t match;  // tokens of context it shares with the query, 1..kMaxMatch
};

// A suffix array of the text read backwards (Manber and Myers 1990), cut at kMaxMatch tokens: the
// positions of the text sorted by the tokens before them. The occurrences of a query's context lie
// around its insertion point, the longest matches nearest; a table finds the contexts that end
// in the same two tokens, or one. It answers what a suffix automaton would.
//
// All documents lie in one text. A kSeparator ends each, and one stands before the first. The index
// is immutable, so any number of threads may query it.
class ExternalIndex {
 public:
  static constexpr Token kSeparator = -1;
  static constexpr std::uint64_t kMaxText = 1u << 31;  // separators included

  // Throws BuildCancelled when the monitor was cancelled, std::invalid_argument when its budget is
  // exceeded.
  ExternalIndex(MappedArray<Token> text, BuildMonitor& monitor);

  // Replaces `out` with at most `most` occurrences, the longest match first. Where one length has
  // more occurrences than fit, takes an even, deterministic sample of them, which preserves the
  // shares of their continuations.
  void find(ContextView context, std::uint32_t most, std::vector<Occurrence>& out) const;

  std::span<const Token> text() const { return {text_.data(), text_.size()}; }
  std::uint64_t num_tokens() const { return num_tokens_; }
  std::uint64_t num_bytes() const { return charge_.bytes(); }
  void charge_to(std::shared_ptr<ExternalBudget> budget) { charge_.move_to(std::move(budget)); }

  std::string check() const;  // empty when consistent, else what is wrong

 private:
  // An interval of order_. In a table, an empty one is an unused slot.
  struct Interval {
    TextPosition begin = 0, end = 0;
    std::size_t size() const { return end - begin; }
  };
  using Table = MappedArray<Interval>;

  // Contexts of 1 and of 2 tokens have tables.
  static constexpr std::uint32_t kTables = 2;

  Table make_table(std::uint32_t length, BuildMonitor& monitor) const;
  template <typename Visit>
  void for_each_interval(std::uint32_t length, Visit visit) const;
  // The positions whose contexts agree with this one in the last `length` tokens, 1 or 2.
  Interval find_interval(ContextView context, std::uint32_t length) const;
  // Widens `found`, whose contexts share at least `match` tokens with this one, to all such
  // positions within `inside`.
  Interval find_extent(ContextView context, std::uint32_t match, Interval found,
                       Interval inside) const;

  // How many tokens the context of a position shares with this one; `known` of them are known.
  std::uint32_t match_length(TextPosition position, ContextView context, std::uint32_t known) const;
  bool comes_before(TextPosition position, ContextView context, std::uint32_t known) const;

  Charge charge_;  // declared first, so given back last
  MappedArray<Token> text_;
  MappedArray<TextPosition> order_;    // positions that have a context, sorted by it
  MappedArray<std::uint8_t> shared_;   // tokens that the contexts of order_[i - 1], order_[i] share
  std::array<Table, kTables> tables_;  // open addressing
  std::uint64_t num_tokens_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_EXTERNAL_INDEX_H_
