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

// The newest pages are held, the others known to be gone, wherever the numbering stands.
void ring_keeps_the_newest(PageNumber start) {
  TokenLog log(5, 2);
  log.begin_numbering_at(start);
  std::uint64_t pushed = 0;
  std::vector<PageNumber> pages;
  for (int i = 0; i < 23; ++i) {
    pages.push_back(log.begin_page(page_after(kNoPosition)));
    for (int t = 0; t <= i % static_cast<int>(kPageTokens); ++t) {
      const Position position = log.push(pages.back(), i);
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
  CHECK(!log.alive(log.successor(pages.back())));
}

void documents_branch() {
  TokenLog log(8, 1);
  const PageNumber first = log.begin_page(page_after(kNoPosition));
  Position last = kNoPosition;
  for (Token t = 0; t < 3; ++t) last = log.push(first, t);
  const PageNumber branch = log.begin_page(page_after(last));
  const Position child = log.push(branch, 7);
  CHECK(log.before(child) == last);
  CHECK(log.after(last) == kNoPosition);
  CHECK(log.after(last - 1) == last);
  CHECK(log.before(first * kPageTokens) == kNoPosition);
}

}  // namespace

void test_token_log() {
  ring_keeps_the_newest(0);
  ring_keeps_the_newest((1u << 27) - 12);  // the numbers go round under way
  documents_branch();
}
