#include "token_log.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ngram {

namespace {

constexpr PageNumber kLastPage = kNoPosition / kPageTokens;  // unused: kNoPosition would lie in it

static_assert(sizeof(PageHeader) == 32);

}  // namespace

TokenLog::TokenLog(std::uint32_t capacity_pages, std::uint32_t num_links)
    : capacity_(capacity_pages),
      num_links_(num_links),
      stride_(page_bytes(num_links)),
      slot_mask_(std::bit_ceil(capacity_pages) - 1) {}

std::size_t TokenLog::page_bytes(std::uint32_t num_links) {
  return sizeof(PageHeader) + kPageTokens * (sizeof(Token) + num_links * sizeof(Position));
}

void TokenLog::reserve(std::uint64_t pages) {
  const std::uint64_t needed = std::min<std::uint64_t>(capacity_, count_ + pages);
  while (slabs_.size() * std::uint64_t{kSlabPages} < needed) {
    const auto first = static_cast<std::uint32_t>(slabs_.size()) * kSlabPages;
    const std::uint32_t slots = std::min(kSlabPages, capacity_ - first);
    slabs_.emplace_back(new (kSlabAlignment) std::byte[slots * stride_]());
  }
}

std::uint32_t TokenLog::new_slot() {
  reserve(1);
  return count_++;
}

std::uint32_t TokenLog::oldest_slot_emptied() {
  const std::uint32_t slot = oldest_;
  const std::uint32_t used = header_of_slot(slot).used;
  num_tokens_ -= used;
  dropped_tokens_ += used;
  oldest_ = slot + 1 == capacity_ ? 0 : slot + 1;
  return slot;
}

PageNumber TokenLog::begin_page(const PageHeader& header) {
  const bool full = count_ == capacity_;
  const std::uint32_t slot = full ? oldest_slot_emptied() : new_slot();
  PageHeader& stored = *reinterpret_cast<PageHeader*>(at(slot));
  PageNumber number = full ? (stored.number + slot_mask_ + 1) & kLastPage : slot;
  if (number == kLastPage) number = slot;
  stored = header;
  stored.number = number;
  stored.next = kNoPage;
  stored.used = 0;
  return number;
}

Position TokenLog::push(PageNumber page, Token token) {
  PageHeader& header = this->header(page);
  const std::uint32_t offset = header.used++;
  const_cast<Token*>(view(page).tokens())[offset] = token;
  ++num_tokens_;
  return page * kPageTokens + offset;
}

Position TokenLog::after(Position p) const {
  const PageHeader& header = this->header(p / kPageTokens);
  if (p % kPageTokens + 1 < header.used) return p + 1;
  return header.next == kNoPage ? kNoPosition : header.next * kPageTokens;
}

std::uint32_t TokenLog::read(Position p, std::uint32_t most, Token* out) const {
  constexpr std::uint32_t kStep = kReadAhead + 1;  // what lies behind a page's tokens is its links
  std::uint32_t offset = p % kPageTokens;
  PageNumber number = p / kPageTokens;
  std::uint32_t count = 0;
  while (true) {
    const PageView page = view(number);
    const std::uint32_t part = std::min<std::uint32_t>(page.header().used - offset, most - count);
    for (std::uint32_t i = 0; i < part; i += kStep) {
      std::memcpy(out + count + i, page.tokens() + offset + i, kStep * sizeof(Token));
    }
    count += part;
    number = page.header().next;
    if (count == most || number == kNoPage) return count;
    offset = 0;
  }
}

std::size_t TokenLog::num_bytes() const {
  const std::uint64_t slots =
      std::min<std::uint64_t>(std::uint64_t{slabs_.size()} * kSlabPages, capacity_);
  return slabs_.capacity() * sizeof(slabs_[0]) + slots * stride_;
}

std::byte* TokenLog::adopt_page() { return at(new_slot()); }

void TokenLog::count_tokens() {
  num_tokens_ = 0;
  for (std::uint32_t slot = 0; slot < count_; ++slot) num_tokens_ += header_of_slot(slot).used;
}

}  // namespace ngram
