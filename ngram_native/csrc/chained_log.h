// A token log whose positions are linked by context: from a context to its earlier positions.
#ifndef NGRAM_NATIVE_CHAINED_LOG_H_
#define NGRAM_NATIVE_CHAINED_LOG_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "context.h"
#include "token_log.h"
#include "types.h"

namespace ngram {

// One hash chain per position: earlier positions that follow the same last `order` tokens.
struct Chain {
  std::uint8_t order;
  bool per_group;  // of the same group only
};

// Where the next token of a document is appended.
struct Cursor {
  std::uint64_t group = 0;
  bool has_group = false;
  Position last = kNoPosition;  // of the document's last token; its page may have been dropped
  PageNumber page = kNoPage;    // the page it writes to: its own, never one it branched from
};

// Hash chains as in LZ77 match finders (Ziv and Lempel 1977; zlib's `prev` array): a table of chain
// heads and one back-link per position and chain. Contexts that share a slot share a chain, and a
// head may name a dropped page, so every step of a walk compares the tokens themselves. Each chain
// has a part of the table to itself: a slot shared by two chains would cut both short.
class ChainedLog {
 public:
  // part_slots: the number of chain heads in each part of the table.
  ChainedLog(std::vector<Chain> chains, std::uint32_t capacity_pages, std::uint32_t part_slots);

  // The largest part_slots with which the table fits into `bytes`.
  static std::uint32_t part_slots_for(const std::vector<Chain>& chains, std::uint64_t bytes);
  static std::uint64_t table_bytes(const std::vector<Chain>& chains, std::uint32_t part_slots);

  // Makes room for that many tokens and documents, so that appending them cannot fail.
  void reserve(std::uint64_t tokens, std::uint64_t documents) {
    log_.reserve(tokens / kPageTokens + 2 * documents);
  }

  // Appends one token of the cursor's document; `context` ends just before it.
  void append(Cursor& cursor, Token token, ContextView context, std::uint32_t policy);
  // Prefetches the table slots that appending a token after `context` writes.
  void prefetch_append(const Cursor& cursor, ContextView context) const;

  // Finds the longest prefix of `tokens` with which documents of the group begin, across branches.
  // Leaves the cursor at its end, ready to branch, and returns its length.
  std::size_t follow(Cursor& cursor, std::span<const Token> tokens) const;

  // A walk goes from the head of a chain to ever earlier positions. Each must be checked: its page
  // may have been dropped, or it may follow another context or belong to another group.
  std::size_t slot(std::uint32_t which, ContextView context, std::uint64_t group) const {
    const std::uint64_t hash = context.hash(chains_[which].order);
    return slot_in_part(which, chains_[which].per_group ? mix(hash, group) : hash);
  }
  Position head(std::size_t slot) const { return ~heads_[slot]; }
  void prefetch_head(std::size_t slot) const { __builtin_prefetch(&heads_[slot]); }
  // Prefetches what a walk along chain `which` reads at `position`; false when nothing is there.
  bool prefetch(Position position, std::uint32_t which) const;

  // How many tokens before a position (page and offset) agree with the end of `context`.
  std::uint32_t match_length(PageView page, std::uint32_t offset, ContextView context) const;

  const TokenLog& log() const { return log_; }
  TokenLog& log() { return log_; }
  const std::vector<Chain>& chains() const { return chains_; }
  std::uint32_t part_slots() const { return part_slots_; }
  std::size_t num_heads() const { return part_slots_ * num_parts(chains_); }
  std::uint32_t* heads() { return heads_.get(); }
  const std::uint32_t* heads() const { return heads_.get(); }
  std::size_t num_bytes() const { return log_.num_bytes() + num_heads() * sizeof(std::uint32_t); }

  // Empty when consistent, else what is wrong.
  std::string check(std::int64_t vocab_size) const;

 private:
  struct Free {
    void operator()(std::uint32_t* memory) const { std::free(memory); }
  };

  bool links(const Chain& chain, const Cursor& cursor, ContextView context) const {
    return context.size() >= chain.order && (!chain.per_group || cursor.has_group);
  }
  std::size_t segment_slot(std::uint64_t group, Position parent) const {
    return slot_in_part(chains_.size(), mix(mix(kHashSeed, group), parent));
  }
  std::size_t slot_in_part(std::size_t part, std::uint64_t hash) const {
    return part * part_slots_ + static_cast<std::size_t>((hash >> 32) * part_slots_ >> 32);
  }
  void touch_heads();
  // One part for each chain and, where there are groups, one for their segments.
  static std::size_t num_parts(const std::vector<Chain>& chains);
  Position exchange_head(std::size_t slot, Position position) {
    const Position previous = ~heads_[slot];
    heads_[slot] = ~position;
    return previous;
  }
  PageNumber begin_page(Cursor& cursor, std::uint32_t policy);

  static constexpr std::uint32_t kMaxSegments = 1024;   // looked at per branching point
  static constexpr std::size_t kMaxFollowed = 1 << 16;  // tokens compared by one follow()

  std::vector<Chain> chains_;
  TokenLog log_;
  std::uint32_t part_slots_;
  std::unique_ptr<std::uint32_t[], Free> heads_;  // complemented, so that zeroed memory is empty
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CHAINED_LOG_H_
