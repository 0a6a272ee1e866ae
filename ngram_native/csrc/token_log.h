// An append-only log of documents in fixed pages, bounded: the oldest page makes room for the
// newest.
#ifndef NGRAM_NATIVE_TOKEN_LOG_H_
#define NGRAM_NATIVE_TOKEN_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "types.h"

namespace ngram {

// A page holds tokens of one document only. Documents may branch: `parent` is the token before the
// page's first one, wherever that lies, so siblings share their prompt.
struct PageHeader {
  std::uint64_t group;   // scope key; meaningless unless has_group
  Position parent;       // kNoPosition: a document begins here
  PageNumber next;       // page that continues this one, kNoPage so far
  PageNumber number;     // of the page now in this slot
  std::uint32_t policy;  // counts weight versions: the one current when the page was begun
  Position sibling;      // previous segment of this chain of segments (see ChainedLog)
  std::uint8_t used;     // tokens written, 1..kPageTokens
  bool has_group;
  bool starts_segment;  // not the continuation of a full page
};

// Ring of pages. Pages are dropped in the order they were begun, which is the order of weight
// versions, then age: constant time, nothing to unlink, since positions of dropped pages are
// recognised by their number. Memory grows a slab at a time and never moves.
class TokenLog {
 public:
  // Page numbers go round at least seven times before one comes back.
  static constexpr std::uint32_t kMaxCapacityPages = 1u << 24;

  // num_links back-links of 4 bytes are kept beside each token. At most kMaxCapacityPages.
  TokenLog(std::uint32_t capacity_pages, std::uint32_t num_links);

  static std::size_t page_bytes(std::uint32_t num_links);

  PageNumber begin_page(const PageHeader& header);
  Position push(PageNumber page, Token token);

  bool alive(PageNumber page) const {
    const std::uint32_t age = next_ > page ? next_ - page : next_ + wrap_ - page;
    return page < wrap_ && age <= count_;
  }
  bool holds(Position position) const {
    return position != kNoPosition && alive(position / kPageTokens);
  }

  // These require a live page, and an offset below `used`.
  PageHeader& header(PageNumber page) { return *reinterpret_cast<PageHeader*>(at(page)); }
  const PageHeader& header(PageNumber page) const {
    return *reinterpret_cast<const PageHeader*>(at(page));
  }
  Token token(Position p) const { return tokens(p / kPageTokens)[p % kPageTokens]; }
  const Token* tokens(PageNumber page) const {
    return reinterpret_cast<const Token*>(at(page) + sizeof(PageHeader));
  }
  Position& link(Position p, std::uint32_t which) {
    return links(at(p / kPageTokens))[which * kPageTokens + p % kPageTokens];
  }
  Position link(Position p, std::uint32_t which) const { return *link_address(p, which); }
  const Position* link_address(Position p, std::uint32_t which) const {
    return &const_cast<TokenLog*>(this)->link(p, which);
  }

  // The neighbours within the document; kNoPosition at its ends and where a page was dropped.
  Position before(Position p) const {
    if (p % kPageTokens != 0) return p - 1;
    const Position parent = header(p / kPageTokens).parent;
    return holds(parent) ? parent : kNoPosition;
  }
  Position after(Position p) const;

  std::uint32_t capacity_pages() const { return capacity_; }
  std::uint32_t num_links() const { return num_links_; }
  std::uint32_t num_pages() const { return count_; }
  std::uint64_t num_tokens() const { return num_tokens_; }
  std::uint64_t dropped_tokens() const { return dropped_tokens_; }
  std::size_t num_bytes() const;
  PageNumber oldest_page() const {
    return next_ >= count_ ? next_ - count_ : next_ + wrap_ - count_;
  }
  PageNumber successor(PageNumber page) const { return page + 1 == wrap_ ? 0 : page + 1; }

  // For saving and loading: the raw bytes of a live page, and a page taken over as it was.
  const std::byte* raw_page(PageNumber page) const { return at(page); }
  std::byte* adopt_page();
  void begin_numbering_at(PageNumber next) { next_ = next % wrap_; }  // of an empty log
  void count_tokens();                                                // of the pages adopted

 private:
  std::byte* at(PageNumber page) {
    const std::uint32_t slot = page % capacity_;
    return slabs_[slot / kSlabPages].get() + (slot % kSlabPages) * stride_;
  }
  const std::byte* at(PageNumber page) const { return const_cast<TokenLog*>(this)->at(page); }
  static Position* links(std::byte* page) {
    return reinterpret_cast<Position*>(page + sizeof(PageHeader) + kPageTokens * sizeof(Token));
  }
  PageNumber claim_slot();

  static constexpr std::uint32_t kSlabPages = 128;

  const std::uint32_t capacity_;   // pages
  const std::uint32_t num_links_;  // per token
  const std::size_t stride_;       // bytes of a page
  const PageNumber wrap_;          // numbers run in [0, wrap_), a multiple of capacity_
  PageNumber next_ = 0;
  std::uint32_t count_ = 0;  // live pages: the numbers [next_ - count_, next_) around the wrap
  std::uint64_t num_tokens_ = 0;
  std::uint64_t dropped_tokens_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> slabs_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_TOKEN_LOG_H_
