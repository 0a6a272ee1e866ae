#include <random>
#include <vector>

#include "check.h"
#include "corpus.h"
#include "saved_file.h"

namespace {

using namespace ngram;

const Options kOptions{
    .max_bytes = 512 << 10, .max_external_bytes = 1 << 20, .max_candidates = 8, .max_steps = 32};

std::vector<Token> document(std::mt19937& random) {
  std::vector<Token> tokens(50 + random() % 50);
  for (Token& token : tokens) token = static_cast<Token>(random() % 7);
  return tokens;
}

void fill(Corpus& corpus, std::uint32_t seed, int documents) {
  std::mt19937 random(seed);
  for (int i = 0; i < documents; ++i) corpus.insert(document(random), i % 3);
  const auto tokens = document(random);
  corpus.add_external("notes", tokens,
                      std::vector<std::int64_t>{0, static_cast<std::int64_t>(tokens.size())});
}

void loaded_is_what_was_saved(int documents) {
  Corpus corpus(kOptions), copy(kOptions);
  fill(corpus, 3, documents);
  const Bytes bytes = saved(corpus);
  load(copy, bytes);
  CHECK(copy.check().empty());
  CHECK(copy.num_tokens() == corpus.num_tokens());
  CHECK(saved(copy) == bytes);
  std::mt19937 random(4);
  for (int i = 0; i < 50; ++i) {
    const auto context = document(random);
    const Proposal a = corpus.query(i % 4, context, 20, 0), b = copy.query(i % 4, context, 20, 0);
    CHECK(a.tokens == b.tokens && a.parents == b.parents && a.probabilities == b.probabilities);
    corpus.insert(context, 1);
    copy.insert(context, 1);
  }
}

void damage_is_refused_whole() {
  Corpus corpus(kOptions), other(kOptions);
  fill(corpus, 5, 20);
  fill(other, 6, 20);
  const Bytes good = saved(corpus), before = saved(other);
  std::mt19937 random(7);
  for (int i = 0; i < 60; ++i) {
    Bytes bad = good;
    if (i % 2 == 0) {
      bad.resize(random() % bad.size());
    } else {
      bad[i < 30 ? random() % 200 : random() % bad.size()] ^= 1u << random() % 8;
    }
    CHECK_REFUSED(load(other, bad));
  }
  Bytes longer = good;
  longer.push_back(0);
  CHECK_REFUSED(load(other, longer));
  CHECK_REFUSED(load(other, Bytes(1000, 'x')));
  CHECK(saved(other) == before);
}

void open_sequences_go_on() {
  Corpus corpus(kOptions);
  fill(corpus, 8, 10);
  const Bytes bytes = saved(corpus);
  const std::vector<std::int64_t> ids{1};
  std::mt19937 random(9);
  corpus.open(1, 2, document(random));
  corpus.propose(ids, std::vector<std::int32_t>{8}, 0);
  load(corpus, bytes);
  const auto tokens = document(random);
  corpus.extend(ids, tokens,
                std::vector<std::int64_t>{0, static_cast<std::int64_t>(tokens.size())});
  CHECK(corpus.check().empty());
}

}  // namespace

void test_serialisation() {
  loaded_is_what_was_saved(0);
  loaded_is_what_was_saved(20);
  loaded_is_what_was_saved(2000);  // more than is kept
  damage_is_refused_whole();
  open_sequences_go_on();
}
