#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "check_tree.h"
#include "corpus.h"

namespace {

using namespace ngram;

const Options kSmall{
    .max_bytes = 256 << 10, .max_external_bytes = 1 << 20, .max_candidates = 8, .max_steps = 32};

std::vector<Token> random_tokens(std::mt19937& random, std::size_t most) {
  std::vector<Token> tokens(random() % (most + 1));
  for (Token& token : tokens) token = static_cast<Token>(random() % 5);
  return tokens;
}

// Everything at once in a corpus so small that pages are dropped all the time.
void survives_anything(std::uint32_t seed) {
  std::mt19937 random(seed);
  Corpus corpus(kSmall);
  std::vector<std::int64_t> open;
  std::int64_t next_id = 0;
  for (int round = 0; round < 3000; ++round) {
    switch (random() % 8) {
      case 0:
        corpus.insert(random_tokens(random, 200),
                      random() % 2 ? std::optional<std::uint64_t>(1) : std::nullopt);
        break;
      case 1:
        if (open.size() < 6) {
          corpus.open(next_id, random() % 3, random_tokens(random, 90));
          open.push_back(next_id++);
        }
        break;
      case 2:
        if (!open.empty() && random() % 4 == 0) {
          corpus.close(open.back());
          open.pop_back();
        }
        break;
      case 3:
        corpus.set_weight_version(round / 50);
        break;
      case 4:
        if (random() % 100 == 0) corpus.reset();
        break;
      case 5:
        if (random() % 20 == 0) {
          const std::string name = std::to_string(random() % 3);
          const auto names = corpus.external_names();
          if (std::find(names.begin(), names.end(), name) != names.end()) {
            corpus.remove_external(name);
          } else {
            const auto tokens = random_tokens(random, 300);
            const auto size = static_cast<std::int64_t>(tokens.size());
            corpus.add_external(name, tokens, std::vector<std::int64_t>{0, size / 3, size});
          }
        }
        break;
      default: {
        std::vector<std::int32_t> budgets;
        std::vector<Token> tokens;
        std::vector<std::int64_t> offsets{0};
        for (std::size_t b = 0; b < open.size(); ++b) {
          budgets.push_back(static_cast<std::int32_t>(random() % kMaxTreeNodes));
          for (const Token token : random_tokens(random, 5)) tokens.push_back(token);
          offsets.push_back(static_cast<std::int64_t>(tokens.size()));
        }
        const Proposal proposal = corpus.propose(open, budgets, random() % 2 ? 0.0 : 0.05);
        for (std::size_t b = 0; b < open.size(); ++b) check_tree(proposal, b, budgets[b]);
        std::vector<std::int32_t> verified;
        for (std::size_t b = 0; b < open.size(); ++b) {
          const auto drafted = proposal.offsets[b + 1] - proposal.offsets[b];
          verified.push_back(static_cast<std::int32_t>(round % (drafted + 1)));
        }
        corpus.extend(open, tokens, offsets, verified);
      }
    }
    if (round % 100 == 0) CHECK(corpus.check().empty());
    CHECK(corpus.num_bytes() < (256 << 10) + (1 << 20));
  }
  CHECK(corpus.check().empty());
  CHECK(corpus.counters().at("dropped_tokens") > 0);
}

void takes_the_extremes() {
  Corpus corpus(kSmall);
  const Token top = std::numeric_limits<Token>::max();
  const std::vector<Token> tokens{top, top - 1, top, 0, top - 1, top};
  corpus.insert(tokens, std::numeric_limits<std::uint64_t>::max());
  corpus.insert({}, std::nullopt);
  corpus.open(std::numeric_limits<std::int64_t>::min(), 0, {});
  CHECK(corpus.query(0, tokens, 63, 0).tokens.size() <= 63);
  corpus.insert(std::vector<Token>(1'000'000, 3), 0);
  const Proposal same = corpus.query(0, std::vector<Token>(50, 3), 63, 0);
  CHECK(same.tokens == std::vector<Token>(8, 3));  // the nearest occurrence ends soonest
  check_tree(same, 0, 63);
  CHECK(corpus.check().empty());
}

}  // namespace

void test_corpus() {
  survives_anything(1);
  survives_anything(2);
  takes_the_extremes();
}
