#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "token_log.h"

namespace {

using namespace ngram;

PageHeader page_after(Position parent) {
  return PageHeader{.group = 1,
                    .parent = parent,
                    .next = kNoPage,
                    .number = 0,
                    .policy = 0,
                    .sibling = kNoPosition,
                    .used = 0,
                    .has_group = true,
                    .starts_segment = parent == kNoPosition};
}

// Pages as a file holds them, whose slots were filled so often before.
void begin_anew(TokenLog& log, std::uint32_t fillings) {
  for (std::uint32_t slot = 0; slot < log.capacity_pages(); ++slot) {
    PageHeader page = page_after(kNoPosition);
    page.number = slot + 8 * fillings;
    page.used = 1;
    std::memcpy(log.adopt_page(), &page, sizeof(page));
  }
  log.count_tokens();
}

// The newest pages are held, the others known to be gone, wherever the numbering stands.
void ring_keeps_the_newest(std::uint32_t fillings) {
  TokenLog log(5, 2);
  if (fillings > 0) begin_anew(log, fillings);
  std::uint64_t pushed = log.num_tokens();
  std::vector<PageNumber> pages;
  for (int i = 0; i < 23; ++i) {
    pages.push_back(log.begin_page(page_after(kNoPosition)));
    for (int t = 0; t <= i % static_cast<int>(kPageTokens); ++t) {
      const Position position = log.push(pages.back(), i);
      CHECK(position != kNoPosition);
      log.link(position, 1) = position;
      ++pushed;
    }
    for (std::size_t j = 0; j < pages.size(); ++j) {
      const bool newest = j + 5 >= pages.size();
      CHECK(log.alive(pages[j]) == newest);
      if (newest) CHECK(log.token(pages[j] * kPageTokens) == static_cast<Token>(j));
    }
    CHECK(log.num_tokens() + log.dropped_tokens() == pushed);
  }
  CHECK(log.num_pages() == 5);
  CHECK(!log.holds(kNoPosition));
  CHECK(!log.alive(pages.back() + 8) && !log.alive(5) && !log.alive(kNoPage));
}

void documents_branch() {
  TokenLog log(8, 1);
  const PageNumber first = log.begin_page(page_after(kNoPosition));
  Position last = kNoPosition;
  for (Token t = 0; t < 3; ++t) last = log.push(first, t);
  const PageNumber branch = log.begin_page(page_after(last));
  const Position child = log.push(branch, 7);
  CHECK(log.header(child / kPageTokens).parent == last);
  CHECK(log.after(last) == kNoPosition);
  CHECK(log.after(last - 1) == last);
}

void reading_goes_on_over_pages() {
  TokenLog log(8, 1);
  PageNumber page = kNoPage;
  for (Token t = 0; t < 70; ++t) {
    if (t % static_cast<Token>(kPageTokens) == 0) {
      const PageNumber next = log.begin_page(page_after(kNoPosition));
      if (page != kNoPage) log.header(page).next = next;
      page = next;
    }
    log.push(page, t);
  }
  for (Position from : {0u, 5u, 31u, 40u, 69u}) {
    for (std::uint32_t most = 1; most < 80; ++most) {
      std::vector<Token> out(most + TokenLog::kReadAhead, -7);
      const std::uint32_t count = log.read(from, most, out.data());
      CHECK(count == std::min(most, 70 - from));
      for (std::uint32_t i = 0; i < count; ++i) CHECK(out[i] == static_cast<Token>(from + i));
    }
  }
}

}  // namespace

void test_token_log() {
  ring_keeps_the_newest(0);
  ring_keeps_the_newest((1u << 24) - 3);  // the numbers go round under way
  documents_branch();
  reading_goes_on_over_pages();
}
