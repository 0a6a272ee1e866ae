#include <numeric>
#include <vector>

#include "chained_log.h"
#include "check.h"

namespace {

using namespace ngram;

void append_all(ChainedLog& log, Cursor& cursor, Context& context, std::vector<Token> tokens) {
  for (const Token token : tokens) {
    log.append(cursor, token, context.view(), 0);
    context.push(token);
  }
}

std::uint32_t match_length(const ChainedLog& log, Position position, const Context& context) {
  return log.match_length(log.log().view(position / kPageTokens), position % kPageTokens,
                          context.view());
}

void follow_goes_through_branches() {
  ChainedLog log({{2, true}}, 64, 16);
  std::vector<Token> prompt(40);
  std::iota(prompt.begin(), prompt.end(), 0);
  Cursor first{.group = 9, .has_group = true};
  Context context;
  append_all(log, first, context, prompt);

  Cursor second{.group = 9, .has_group = true};
  CHECK(log.follow(second, prompt) == prompt.size());
  CHECK(second.last == first.last && second.page == kNoPage);
  Context other = context;
  append_all(log, first, context, {100, 101});
  append_all(log, second, other, {100, 200, 201});

  std::vector<Token> rest = prompt;
  rest.insert(rest.end(), {100, 200, 201, 5});
  Cursor third{.group = 9, .has_group = true};
  CHECK(log.follow(third, rest) == prompt.size() + 3);
  CHECK(third.last == second.last);
  Cursor stranger{.group = 8, .has_group = true};
  CHECK(log.follow(stranger, rest) == 0);
  CHECK(log.check(1 << 30).empty());
}

void walks_lead_from_newest_to_oldest() {
  ChainedLog log({{1, false}}, 64, 64);
  Cursor cursor;
  Context context;
  for (Token t = 0; t < 6; ++t) append_all(log, cursor, context, {77, t});
  append_all(log, cursor, context, {77});
  Position position = log.head(log.slot(0, context.view(), 0));
  for (Token t = 5; t >= 0; --t) {
    CHECK(log.log().holds(position) && log.log().token(position) == t);
    CHECK(match_length(log, position, context) >= 1);
    position = log.log().link(position, 0);
  }
  CHECK(!log.log().holds(position));
}

void matches_end_with_the_document() {
  ChainedLog log({{1, false}}, 64, 64);
  Context context;
  Cursor cursor;
  append_all(log, cursor, context, {1, 2, 3});
  Context longer;
  for (const Token t : {9, 1, 2}) longer.push(t);
  CHECK(match_length(log, cursor.last, longer) == 2);
  Context endless;
  Cursor same;
  append_all(log, same, endless, std::vector<Token>(100, 4));
  CHECK(match_length(log, same.last, endless) == kMaxMatch);
}

}  // namespace

void test_chained_log() {
  follow_goes_through_branches();
  walks_lead_from_newest_to_oldest();
  matches_end_with_the_document();
}
