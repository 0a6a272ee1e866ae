#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "external_builder.h"
#include "external_index.h"

namespace {

using namespace ngram;

using Documents = std::vector<std::vector<Token>>;

std::shared_ptr<ExternalBudget> budget_of(std::uint64_t bytes) {
  return std::make_shared<ExternalBudget>(bytes);
}

void append_documents(ExternalBuilder& builder, const Documents& documents) {
  std::vector<Token> tokens;
  std::vector<std::int64_t> offsets{0};
  for (const auto& document : documents) {
    tokens.insert(tokens.end(), document.begin(), document.end());
    offsets.push_back(static_cast<std::int64_t>(tokens.size()));
  }
  builder.append(tokens, offsets);
}

std::unique_ptr<ExternalIndex> index_of(const Documents& documents) {
  ExternalBuilder builder(budget_of(1 << 30));
  append_documents(builder, documents);
  CHECK(builder.build({}));
  CHECK(builder.fraction_indexed() == 1.0);
  return builder.take();
}

std::uint32_t common_suffix(const std::vector<Token>& document, std::size_t end,
                            const std::vector<Token>& text) {
  std::uint32_t match = 0;
  while (match < kMaxMatch && match < end && match < text.size() &&
         document[end - 1 - match] == text[text.size() - 1 - match]) {
    ++match;
  }
  return match;
}

// What find() gives, against a look at every place.
void agrees_with_all_places(const ExternalIndex& index, const Documents& documents,
                            const std::vector<Token>& text, std::uint32_t most) {
  std::vector<std::size_t> expected(kMaxMatch + 1);
  for (const auto& document : documents) {
    for (std::size_t p = 1; p < document.size(); ++p) {
      ++expected[common_suffix(document, p, text)];
    }
  }
  Context context;
  context.push(text);
  std::vector<Occurrence> found{{nullptr, 99}};  // not to be seen again
  index.find(context.view(), most, found);
  std::size_t i = 0, room = most;
  for (std::uint32_t match = kMaxMatch; match > 0; --match) {
    const std::size_t count = std::min(expected[match], room);
    room -= count;
    for (std::size_t k = 0; k < count; ++k, ++i) {
      CHECK(i < found.size() && found[i].match == match && *found[i].next >= 0);
      for (std::uint32_t j = 1; j <= match; ++j) {
        CHECK(found[i].next[-static_cast<std::ptrdiff_t>(j)] == context.view().back(j - 1));
      }
      for (std::size_t other = 0; other < i; ++other) CHECK(found[other].next != found[i].next);
    }
  }
  CHECK(found.size() == i);
  std::vector<Occurrence> again;
  index.find(context.view(), most, again);
  for (i = 0; i < found.size(); ++i) CHECK(found[i].next == again[i].next);
}

Token below(std::mt19937& random, Token end) {
  return static_cast<Token>(random() % static_cast<std::uint32_t>(end));
}

void finds_what_a_look_at_every_place_finds(std::uint32_t seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < 60; ++round) {
    const Token alphabet = 1 + static_cast<Token>(random() % 6);
    const Token base = round % 3 == 0 ? std::numeric_limits<Token>::max() - alphabet + 1 : 0;
    Documents documents(random() % 6);
    for (auto& document : documents) {
      document.resize(random() % 120);
      for (Token& token : document) token = base + below(random, alphabet);
    }
    const auto index = index_of(documents);
    CHECK(index->check().empty());
    for (int query = 0; query < 30; ++query) {
      std::vector<Token> text(random() % 50);
      for (Token& token : text) token = base + below(random, alphabet);
      if (!documents.empty() && random() % 2) {  // what was said before, then something else
        const auto& document = documents[random() % documents.size()];
        text.assign(document.begin(), document.begin() + static_cast<std::ptrdiff_t>(
                                                             random() % (document.size() + 1)));
        if (random() % 2) text.insert(text.begin(), base);
      }
      for (const std::uint32_t most : {0u, 1u, 5u, 32u, 1000u}) {
        agrees_with_all_places(*index, documents, text, most);
      }
    }
  }
}

// Groups too large for the sorter's records, and texts that agree as far as is compared.
void sorts_texts_that_repeat_themselves() {
  std::vector<Token> fibonacci{0}, next{0, 1};
  while (next.size() < 70'000) {
    next.insert(next.end(), fibonacci.begin(), fibonacci.end());
    fibonacci.assign(next.begin(), next.end() - static_cast<std::ptrdiff_t>(fibonacci.size()));
  }
  for (const Documents& documents :
       {Documents{std::vector<Token>(70'000, 3)}, Documents{next}, Documents(3, next),
        Documents(40'000, std::vector<Token>{1, 2})}) {
    const auto index = index_of(documents);
    CHECK(index->check().empty());
    std::uint64_t tokens = 0;
    for (const auto& document : documents) tokens += document.size();
    CHECK(index->num_tokens() == tokens);
  }
}

// Of too many occurrences the shares of what follows are kept, also where it alternates.
void samples_are_even() {
  Documents documents;
  for (Token t = 0; t < 3000; ++t) documents.push_back({7, 8, 9, t % 4 == 0 ? 1 : 2});
  const auto index = index_of(documents);
  for (const std::vector<Token>& text : {std::vector<Token>{7, 8, 9}, {5, 8, 9}, {5, 5, 9}}) {
    Context context;
    context.push(text);
    std::vector<Occurrence> found;
    index->find(context.view(), 400, found);
    const auto ones =
        std::count_if(found.begin(), found.end(), [](const Occurrence& o) { return *o.next == 1; });
    CHECK(found.size() == 400 && ones > 80 && ones < 120);
  }
}

void memory_is_counted_and_given_back() {
  const auto budget = budget_of(1 << 20);
  std::mt19937 random(1);
  {
    ExternalBuilder builder(budget);
    Documents documents(1, std::vector<Token>(40'000));
    for (Token& token : documents[0]) token = static_cast<Token>(random() % 50);
    append_documents(builder, documents);
    CHECK(budget->used() == builder.num_bytes() && budget->used() >= 4 * 40'000);
    CHECK(builder.num_tokens() == 40'000);
    // A document too many is refused whole.
    CHECK_REFUSED(append_documents(builder, Documents(1, std::vector<Token>(1 << 20))));
    CHECK(builder.num_tokens() == 40'000 && budget->used() == builder.num_bytes());
    CHECK(!builder.build([] { return false; }));
    CHECK(budget->used() == 0);
    CHECK_REFUSED(builder.take());
    CHECK_REFUSED(builder.build({}));
    CHECK_REFUSED(append_documents(builder, {{1}}));
  }
  ExternalBuilder large(budget);  // its documents fit, its index does not
  append_documents(large, Documents(1, std::vector<Token>(200'000)));
  CHECK_REFUSED(large.build({}));
  CHECK(budget->used() == 0);
  ExternalBuilder small(budget);
  append_documents(small, {{1, 2, 3}, {}, {4}});
  append_documents(small, {});
  CHECK(small.build({}));
  auto index = small.take();
  CHECK(index->num_bytes() == budget->used() && index->num_tokens() == 4);
  index.reset();
  CHECK(budget->used() == 0);
}

void a_build_is_cancelled_from_another_thread() {
  const auto budget = budget_of(1 << 30);
  ExternalBuilder builder(budget);
  append_documents(builder, Documents(1, std::vector<Token>(2'000'000, 5)));
  std::thread thread([&] {
    while (builder.num_bytes() < 2 * 4 * 2'000'000) std::this_thread::yield();  // it sorts
    builder.cancel();
  });
  CHECK(!builder.build({}));
  thread.join();
  CHECK(budget->used() == 0 && builder.fraction_indexed() < 1);
}

}  // namespace

void test_external_index() {
  finds_what_a_look_at_every_place_finds(1);
  finds_what_a_look_at_every_place_finds(2);
  sorts_texts_that_repeat_themselves();
  samples_are_even();
  memory_is_counted_and_given_back();
  a_build_is_cancelled_from_another_thread();
}
