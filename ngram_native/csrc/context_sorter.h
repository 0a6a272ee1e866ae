// Sorts the positions of a text by the tokens before them.
#ifndef NGRAM_NATIVE_CONTEXT_SORTER_H_
#define NGRAM_NATIVE_CONTEXT_SORTER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "build_monitor.h"
#include "mapped_array.h"
#include "types.h"

namespace ngram {

// An index into the text of an ExternalIndex.
using TextPosition = std::uint32_t;

// A radix sort by pairs of tokens, the nearest pair first. Each round sorts every group of contexts
// that agree so far by the next two tokens back, and splits the group. A context ends after
// kMaxMatch tokens, or at the negative token before its document, so there are at most kMaxMatch /
// 2 rounds whatever the text. Equal contexts stay in the order of their positions.
class ContextSorter {
 public:
  // order: positions in ascending order; sorted in place.
  // shared: of the same size; shared[i] becomes the number of tokens that the contexts of order[i]
  // and order[i - 1] have in common. shared[0] is 0.
  ContextSorter(const Token* text, MappedArray<TextPosition>& order,
                MappedArray<std::uint8_t>& shared, BuildMonitor& monitor);

  // Bytes of scratch memory, beside order and shared.
  static std::uint64_t scratch_bytes(std::size_t num_positions);

  void sort();

 private:
  struct Record {
    std::uint64_t key;
    TextPosition position;
  };

  // The tokens `depth` + 1 and `depth` + 2 before a position; 0 stands for the context's end.
  std::uint64_t key(TextPosition position, std::uint32_t depth) const {
    const Token* back = text_ + position - 1 - depth;
    if (*back < 0) return 0;
    return (static_cast<std::uint64_t>(*back) + 1) << 32 |
           (static_cast<std::uint32_t>(back[-1]) + 1);
  }
  void prefetch(TextPosition position, std::uint32_t depth) const {
    __builtin_prefetch(text_ + (position - 1 - std::min(depth, position - 1)));
  }
  // How many tokens two contexts share that agree in `depth` tokens and go on with these keys.
  static std::uint8_t common(std::uint64_t a, std::uint64_t b, std::uint32_t depth);
  static bool is_last(std::uint64_t key, std::uint32_t depth);

  void refine(std::size_t begin, std::size_t end, std::uint32_t depth);
  void order_pair(std::size_t begin, std::uint32_t depth);
  void sort_records(std::size_t begin, std::size_t end, std::uint32_t depth);
  void sort_positions(std::size_t begin, std::size_t end, std::uint32_t depth);
  template <typename Item, typename KeyOf, typename Prefetch>
  Item* radix_sort(Item* items, Item* scratch, std::size_t size, KeyOf key_of, Prefetch prefetch);
  void checkpoint(std::size_t i) const {
    if (i % BuildMonitor::kStride == 0) monitor_.checkpoint();
  }
  void finish(std::uint64_t positions);

  static constexpr std::uint8_t kUndecided = 255;
  // Larger groups are sorted without copies of their keys, to bound the scratch memory.
  static constexpr std::size_t kMaxRecords = 1 << 15;

  const Token* const text_;
  MappedArray<TextPosition>& order_;
  MappedArray<std::uint8_t>& shared_;
  BuildMonitor& monitor_;
  MappedArray<TextPosition> positions_;         // scratch
  MappedArray<Record> records_, more_records_;  // scratch
  std::uint64_t finished_ = 0, reported_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CONTEXT_SORTER_H_
