// A bounded log of documents in pages of fixed size. The newest page takes the place of the oldest.
#ifndef NGRAM_NATIVE_TOKEN_LOG_H_
#define NGRAM_NATIVE_TOKEN_LOG_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "types.h"

namespace ngram {

// A page holds tokens of one document only. Documents may branch: `parent` is the token before the
// page's first one and may lie in another document, so siblings share their prompt.
struct PageHeader {
  std::uint64_t group;   // scope key; meaningless unless has_group
  Position parent;       // kNoPosition: a document begins here
  PageNumber next;       // page that continues this one; kNoPage until there is one
  PageNumber number;     // of the page now in this slot
  std::uint32_t policy;  // the policy, counted from 0, when the page was begun
  Position sibling;      // previous segment of this chain of segments (see ChainedLog)
  std::uint8_t used;     // tokens written, 1..kPageTokens
  bool has_group;
  bool starts_segment;  // not the continuation of a full page
};

// A page as it lies in memory: header, tokens, then the back-links of each chain.
class PageView {
 public:
  explicit PageView(const std::byte* memory) : memory_(memory) {}

  const PageHeader& header() const { return *reinterpret_cast<const PageHeader*>(memory_); }
  const Token* tokens() const {
    return reinterpret_cast<const Token*>(memory_ + sizeof(PageHeader));
  }
  const Position* link(std::uint32_t offset, std::uint32_t which) const {
    return reinterpret_cast<const Position*>(memory_ + sizeof(PageHeader) +
                                             kPageTokens * sizeof(Token)) +
           which * kPageTokens + offset;
  }

 private:
  const std::byte* memory_;
};

// A ring of slots. Pages are dropped in the order in which they were begun, so the oldest policy's
// go first. That takes constant time and unlinks nothing, because positions of dropped pages are
// recognised by their number. Memory grows a slab at a time and never moves.
class TokenLog {
 public:
  // A slot is filled at least eight times before a page number comes back.
  static constexpr std::uint32_t kMaxCapacityPages = 1u << 24;

  // num_links back-links of 4 bytes are stored beside each token. At most kMaxCapacityPages.
  TokenLog(std::uint32_t capacity_pages, std::uint32_t num_links);

  static std::size_t page_bytes(std::uint32_t num_links);

  // Allocates the memory of the next `pages` pages, as far as there are slots, so that beginning
  // them cannot fail.
  void reserve(std::uint64_t pages);
  PageNumber begin_page(const PageHeader& header);
  Position push(PageNumber page, Token token);

  bool alive(PageNumber page) const { return slot(page) < count_ && header(page).number == page; }
  bool holds(Position position) const {
    return position != kNoPosition && alive(position / kPageTokens);
  }
  // Whether the position's page header may be read, to find out whether the log holds it.
  bool may_hold(Position position) const {
    return position != kNoPosition && slot(position / kPageTokens) < count_;
  }

  // These require a live page and an offset below `used`; `view` requires allocated memory alone.
  PageView view(PageNumber page) const { return PageView(at(slot(page))); }
  PageHeader& header(PageNumber page) { return *reinterpret_cast<PageHeader*>(at(slot(page))); }
  const PageHeader& header(PageNumber page) const { return view(page).header(); }
  Token token(Position p) const { return view(p / kPageTokens).tokens()[p % kPageTokens]; }
  Position& link(Position p, std::uint32_t which) {
    return const_cast<Position&>(*view(p / kPageTokens).link(p % kPageTokens, which));
  }

  // Position of the next token of the document; kNoPosition at its end.
  Position after(Position p) const;

  // Copies at most `most` tokens from `p` on and returns how many. Writes up to kReadAhead tokens
  // beyond them.
  static constexpr std::uint32_t kReadAhead = 3;
  std::uint32_t read(Position p, std::uint32_t most, Token* out) const;

  std::uint32_t capacity_pages() const { return capacity_; }
  std::uint32_t num_links() const { return num_links_; }
  std::uint32_t num_pages() const { return count_; }
  std::uint64_t num_tokens() const { return num_tokens_; }
  std::uint64_t dropped_tokens() const { return dropped_tokens_; }
  std::size_t num_bytes() const;

  // By slot, in [0, num_pages()).
  const PageHeader& header_of_slot(std::uint32_t slot) const { return PageView(at(slot)).header(); }

  bool lies_in(PageNumber page, std::uint32_t slot) const { return this->slot(page) == slot; }

  // For saving and loading: the raw bytes of a slot, and room for a page that was saved.
  const std::byte* raw_page(std::uint32_t slot) const { return at(slot); }
  std::byte* adopt_page();
  std::uint32_t oldest_slot() const { return oldest_; }
  void adopt_oldest_slot(std::uint32_t slot) { oldest_ = slot % capacity_; }
  void count_tokens();  // of all adopted pages

 private:
  std::uint32_t slot(PageNumber page) const { return page & slot_mask_; }
  std::byte* at(std::uint32_t slot) {
    return slabs_[slot / kSlabPages].get() + (slot % kSlabPages) * stride_;
  }
  const std::byte* at(std::uint32_t slot) const { return const_cast<TokenLog*>(this)->at(slot); }
  std::uint32_t new_slot();
  std::uint32_t oldest_slot_emptied();

  static constexpr std::uint32_t kSlabPages = 128;

  // A page is a multiple of half a cache line, so that no header lies in two.
  static constexpr std::align_val_t kSlabAlignment{64};
  struct FreeSlab {
    void operator()(std::byte* slab) const { ::operator delete[](slab, kSlabAlignment); }
  };

  const std::uint32_t capacity_;   // pages
  const std::uint32_t num_links_;  // per token
  const std::size_t stride_;       // bytes of a page
  const PageNumber slot_mask_;     // the bits of a page's number that are its slot; the rest count
  std::uint32_t count_ = 0;        // slots taken
  std::uint32_t oldest_ = 0;       // the slot to be used next, once all are taken
  std::uint64_t num_tokens_ = 0;
  std::uint64_t dropped_tokens_ = 0;
  std::vector<std::unique_ptr<std::byte[], FreeSlab>> slabs_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_TOKEN_LOG_H_
