// Every call from many threads at once, for the thread sanitizer.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check_tree.h"
#include "corpus.h"
#include "saved_file.h"

namespace {

using namespace ngram;

constexpr std::int64_t kWorkers = 4;
constexpr std::int64_t kOwnSequences = 3;
const Options kOptions{
    .max_bytes = 256 << 10, .max_external_bytes = 1 << 20, .max_candidates = 8, .max_steps = 32};

std::vector<Token> random_tokens(std::mt19937& random, std::size_t most) {
  std::vector<Token> tokens(random() % (most + 1));
  for (Token& token : tokens) token = static_cast<Token>(random() % 4);
  return tokens;
}

class Stress {
 public:
  // For so many rounds of each engine, or, where that is 0, so many seconds. Returns the calls
  // made.
  std::uint64_t run(double seconds, std::uint64_t rounds, std::uint32_t seed) {
    std::vector<std::thread> engines, others;
    for (std::int64_t worker = 0; worker < kWorkers; ++worker) {
      engines.emplace_back([=, this] { generate(worker, rounds, seed); });
    }
    others.emplace_back([=, this] { change_externals(seed); });
    others.emplace_back([=, this] { save_and_load(seed); });
    others.emplace_back([this] { look(); });
    if (rounds == 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      stop_ = true;
    }
    for (std::thread& engine : engines) engine.join();
    stop_ = true;
    for (std::thread& other : others) other.join();
    CHECK(corpus_.check().empty());
    CHECK(corpus_.counters().at("open_sequences") == 0);
    return calls_;
  }

 private:
  // An engine's loop, over sequences of its own.
  void generate(std::int64_t worker, std::uint64_t rounds, std::uint32_t seed) {
    std::mt19937 random(seed + static_cast<std::uint32_t>(worker));
    const std::vector<std::int32_t> budgets{0, 8, 63};
    for (std::uint64_t round = 0; !stop_ && (rounds == 0 || round < rounds); ++round) {
      std::vector<std::int64_t> ids;
      for (std::int64_t i = 0; i < kOwnSequences; ++i) {
        ids.push_back(worker * kOwnSequences + i);
        corpus_.open(ids.back(), random() % 2, random_tokens(random, 60));
      }
      for (int step = 0; step < 20; ++step) {
        const Proposal proposal = corpus_.propose(ids, budgets, 0);
        std::vector<Token> tokens;
        std::vector<std::int64_t> offsets{0};
        std::vector<std::int32_t> verified;
        for (std::size_t b = 0; b < ids.size(); ++b) {
          check_tree(proposal, b, budgets[b]);
          const auto begin = static_cast<std::size_t>(proposal.offsets[b]);
          const auto drafted = static_cast<std::size_t>(proposal.offsets[b + 1]) - begin;
          if (drafted > 0) tokens.push_back(proposal.tokens[begin]);
          verified.push_back(static_cast<std::int32_t>(random() % (drafted + 1)));
          const auto own = random_tokens(random, 5);
          tokens.insert(tokens.end(), own.begin(), own.end());
          offsets.push_back(static_cast<std::int64_t>(tokens.size()));
        }
        corpus_.extend(ids, tokens, offsets, verified);
        check_tree(corpus_.query(random() % 3, random_tokens(random, 40), 20, 0), 0, 20);
        corpus_.insert(random_tokens(random, 100), random() % 2);
        corpus_.set_weight_version(step / 5);
        calls_ += 5;
      }
      for (const std::int64_t id : ids) corpus_.close(id);
    }
  }

  void change_externals(std::uint32_t seed) {
    std::mt19937 random(seed + 100);
    const std::array<std::string, 3> names = {"a", "b", "c"};
    while (!stop_) {
      const std::string& name = names[random() % names.size()];
      const auto tokens = random_tokens(random, 3000);
      const auto size = static_cast<std::int64_t>(tokens.size());
      try {
        if (random() % 2 == 0) {
          corpus_.add_external(name, tokens, std::vector<std::int64_t>{0, size / 2, size});
        } else {
          corpus_.remove_external(name);
        }
      } catch (const std::invalid_argument&) {
        // Taken already, or never added.
      }
      CHECK(corpus_.external_names().size() <= names.size());
      calls_ += 2;
    }
  }

  void save_and_load(std::uint32_t seed) {
    std::mt19937 random(seed + 200);
    while (!stop_) {
      Bytes bytes = saved(corpus_);
      Corpus copy(kOptions);
      load(copy, bytes);
      CHECK(saved(copy) == bytes);
      if (random() % 8 == 0) load(corpus_, bytes);
      if (random() % 8 == 0) corpus_.reset();
      bytes[random() % bytes.size()] ^= 1;
      CHECK_REFUSED(load(corpus_, bytes));
      calls_ += 2;
    }
  }

  void look() {
    while (!stop_) {
      CHECK(corpus_.check().empty());
      CHECK(corpus_.num_bytes() <= kOptions.max_bytes + kOptions.max_external_bytes);
      CHECK(corpus_.counters().at("live_tokens") >= 0);
      CHECK(corpus_.num_tokens() < kOptions.max_bytes + kOptions.max_external_bytes);
      calls_ += 4;
      std::this_thread::yield();
    }
  }

  Corpus corpus_{kOptions};
  std::atomic<bool> stop_ = false;
  std::atomic<std::uint64_t> calls_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  double seconds = 10;
  std::uint64_t rounds = 0;
  std::uint32_t seed = 1;
  for (int i = 1; i < argc; i += 2) {
    const std::string argument = argv[i];
    if (i + 1 < argc && argument == "--seconds") {
      seconds = std::atof(argv[i + 1]);
    } else if (i + 1 < argc && argument == "--rounds") {
      rounds = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (i + 1 < argc && argument == "--seed") {
      seed = static_cast<std::uint32_t>(std::strtoul(argv[i + 1], nullptr, 10));
    } else {
      std::fprintf(stderr, "usage: %s [--seconds S | --rounds N] [--seed N]\n", argv[0]);
      return 2;
    }
  }
  const std::uint64_t calls = Stress().run(seconds, rounds, seed);
  std::printf("%s: %llu calls\n", argv[0], static_cast<unsigned long long>(calls));
}
