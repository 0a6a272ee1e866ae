#include "token_log.h"

#include <algorithm>
#include <cstring>

namespace ngram {

namespace {

constexpr std::uint32_t kPageNumbers = (1u << 27) - 1;  // so that no position is kNoPosition

}  // namespace

TokenLog::TokenLog(std::uint32_t capacity_pages, std::uint32_t num_links)
    : capacity_(capacity_pages),
      num_links_(num_links),
      stride_(page_bytes(num_links)),
      wrap_(kPageNumbers / capacity_ * capacity_) {}

std::size_t TokenLog::page_bytes(std::uint32_t num_links) {
  return sizeof(PageHeader) + kPageTokens * (sizeof(Token) + num_links * sizeof(Position));
}

PageNumber TokenLog::claim_slot() {
  if (count_ == capacity_) {
    const std::uint32_t used = header(oldest_page()).used;
    num_tokens_ -= used;
    dropped_tokens_ += used;
    --count_;
  }
  const PageNumber page = next_;
  const std::uint32_t slab = page % capacity_ / kSlabPages;
  if (slab >= slabs_.size()) slabs_.resize(slab + 1);
  if (!slabs_[slab]) {
    const std::uint32_t pages = std::min(kSlabPages, capacity_ - slab * kSlabPages);
    slabs_[slab] = std::make_unique<std::byte[]>(pages * stride_);
  }
  next_ = successor(next_);
  ++count_;
  return page;
}

PageNumber TokenLog::begin_page(const PageHeader& header) {
  const PageNumber page = claim_slot();
  PageHeader& stored = this->header(page);
  stored = header;
  stored.number = page;
  stored.next = kNoPage;
  stored.used = 0;
  return page;
}

Position TokenLog::push(PageNumber page, Token token) {
  PageHeader& header = this->header(page);
  const std::uint32_t offset = header.used++;
  const_cast<Token*>(tokens(page))[offset] = token;
  ++num_tokens_;
  return page * kPageTokens + offset;
}

Position TokenLog::after(Position p) const {
  const PageHeader& header = this->header(p / kPageTokens);
  if (p % kPageTokens + 1 < header.used) return p + 1;
  return header.next == kNoPage ? kNoPosition : header.next * kPageTokens;
}

std::size_t TokenLog::num_bytes() const {
  std::size_t bytes = slabs_.capacity() * sizeof(slabs_[0]);
  for (std::size_t slab = 0; slab < slabs_.size(); ++slab) {
    if (!slabs_[slab]) continue;
    const auto first = static_cast<std::uint32_t>(slab) * kSlabPages;
    bytes += std::min(kSlabPages, capacity_ - first) * stride_;
  }
  return bytes;
}

std::byte* TokenLog::adopt_page() { return at(claim_slot()); }

void TokenLog::count_tokens() {
  num_tokens_ = 0;
  PageNumber page = oldest_page();
  for (std::uint32_t i = 0; i < count_; ++i, page = successor(page)) {
    num_tokens_ += header(page).used;
  }
}

}  // namespace ngram
