// Fuzzes the corpus's calls: a byte string is a sequence of them, and after each the corpus is
// compared with the oracle, with itself asked another way, and with its own books.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check_tree.h"
#include "corpus.h"
#include "input.h"
#include "oracle.h"
#include "saved_file.h"

namespace {

using namespace ngram;
using namespace ngram::fuzz;

constexpr std::size_t kMaxInput = 4096;
constexpr std::size_t kMaxCalls = 200;
constexpr std::size_t kMaxOpen = 5;
constexpr std::uint64_t kExternalBytes = 256 << 10;
constexpr std::uint32_t kAmpleSteps = 1 << 20;  // no chain is cut short
constexpr std::array<std::uint64_t, 3> kGroups = {0, 1, ~std::uint64_t{0}};

Options draw_options(Input& input) {
  const auto candidates = input.pick(std::array<std::uint32_t, 4>{1, 2, 8, 32});
  return Options{.max_bytes = input.pick(std::array<std::uint64_t, 2>{256 << 10, 320 << 10}),
                 .max_external_bytes = kExternalBytes,
                 .max_candidates = candidates,
                 .max_steps = input.below(4) == 0 ? candidates : kAmpleSteps};
}

bool same(const Proposal& a, std::size_t entry, const Proposal& b) {
  const auto equal = [&](const auto& all, const auto& one) {
    return std::equal(all.begin() + a.offsets[entry], all.begin() + a.offsets[entry + 1],
                      one.begin(), one.end());
  };
  return equal(a.tokens, b.tokens) && equal(a.parents, b.parents) && equal(a.depths, b.depths) &&
         equal(a.masks, b.masks) && equal(a.probabilities, b.probabilities) &&
         equal(a.sources, b.sources);
}

class Session {
 public:
  explicit Session(Input& input) : input_(input), options_(draw_options(input)) {}

  void run() {
    for (std::size_t call = 0; call < kMaxCalls && !input_.empty(); ++call) {
      one_call();
      check();
    }
  }

 private:
  void one_call() {
    switch (input_.below(16)) {
      case 0:
      case 1:
        return insert();
      case 2:
        return insert_often();
      case 3:
      case 4:
        return open();
      case 5:
      case 6:
        return extend();
      case 7:
      case 8:
        return propose();
      case 9:
        return query();
      case 10:
        return close();
      case 11:
        return corpus_.set_weight_version(input_.below(3));
      case 12:
        return add_or_remove_external();
      case 13:
        return refused_calls();
      case 14:
        if (input_.below(4) != 0) return propose_and_extend();
        return save_or_load();
      default:
        if (input_.below(4) != 0) return propose_and_extend();
        corpus_.reset();
        oracle_.reset();
        complete_ = true;
    }
  }

  void check() {
    const std::string reason = corpus_.check();
    if (!reason.empty()) std::fprintf(stderr, "check(): %s\n", reason.c_str());
    CHECK(reason.empty());
    const auto counters = corpus_.counters();
    complete_ = complete_ && counters.at("dropped_tokens") == 0;
    if (complete_) CHECK(corpus_.num_tokens() == oracle_.num_tokens());
    CHECK(counters.at("live_bytes") + counters.at("bookkeeping_bytes") <=
          static_cast<double>(options_.max_bytes));
    CHECK(counters.at("external_bytes") <= static_cast<double>(kExternalBytes));
    CHECK(counters.at("open_sequences") == static_cast<double>(oracle_.sequences().size()));
  }

  std::optional<std::uint64_t> draw_group() {
    if (input_.below(4) == 0) return std::nullopt;
    return input_.pick(kGroups);
  }

  std::vector<std::int64_t> draw_open(bool all) {
    std::vector<std::int64_t> ids;
    for (const auto& [id, sequence] : oracle_.sequences()) {
      if (all || input_.below(4) != 0) ids.push_back(id);
    }
    if (input_.below(2) != 0) std::reverse(ids.begin(), ids.end());
    return ids;
  }

  void insert() {
    const auto group = draw_group();
    const auto tokens = input_.tokens(200);
    corpus_.insert(tokens, group);
    oracle_.insert(tokens, group);
  }

  // Every document takes a page: soon they are all taken.
  void insert_often() {
    const auto group = draw_group();
    const auto tokens = input_.tokens(6);
    for (std::uint32_t times = 10 * input_.below(16); times > 0; --times) {
      corpus_.insert(tokens, group);
      oracle_.insert(tokens, group);
    }
  }

  void open() {
    if (oracle_.sequences().size() == kMaxOpen) return;
    auto group = input_.pick(kGroups);
    auto tokens = input_.tokens(90);
    if (!oracle_.sequences().empty() && input_.below(2) != 0) {  // cut and resubmitted
      const Oracle::Sequence& sequence = oracle_.sequences().begin()->second;
      group = sequence.group;
      const std::vector<Token>& text = sequence.text;
      const std::size_t kept = text.size() - std::min<std::size_t>(input_.below(8), text.size());
      tokens.insert(tokens.begin(), text.begin(), text.begin() + static_cast<std::ptrdiff_t>(kept));
    }
    corpus_.open(next_id_, group, tokens);
    oracle_.open(next_id_, group, tokens);
    next_id_ = next_id_ < 0 ? 1 : next_id_ + 1;
  }

  void extend() {
    const auto ids = draw_open(false);
    std::vector<std::vector<Token>> added;
    for (std::size_t b = 0; b < ids.size(); ++b) {
      added.push_back(input_.tokens(input_.below(4) == 0 ? 80 : 3));
    }
    extend(ids, added);
  }

  void extend(std::span<const std::int64_t> ids, const std::vector<std::vector<Token>>& added) {
    std::vector<Token> flat;
    std::vector<std::int64_t> offsets{0};
    for (std::size_t b = 0; b < ids.size(); ++b) {
      flat.insert(flat.end(), added[b].begin(), added[b].end());
      offsets.push_back(static_cast<std::int64_t>(flat.size()));
    }
    if (input_.below(2) == 0) {
      corpus_.extend(ids, flat, offsets);
    } else {
      std::vector<std::int32_t> verified;
      for (const std::int64_t id : ids) {
        const std::uint32_t drafted = oracle_.sequences().at(id).drafted;
        verified.push_back(static_cast<std::int32_t>(drafted - input_.below(drafted + 1)));
      }
      corpus_.extend(ids, flat, offsets, verified);
    }
    for (std::size_t b = 0; b < ids.size(); ++b) oracle_.extend(ids[b], added[b]);
  }

  Proposal propose(std::span<const std::int64_t> ids) {
    std::vector<std::int32_t> budgets;
    for (std::size_t b = 0; b < ids.size(); ++b) {
      budgets.push_back(static_cast<std::int32_t>(input_.below(kMaxTreeNodes)));
    }
    const double floor = input_.pick(std::array<double, 3>{0.0, 0.05, 0.3});
    const Proposal together = corpus_.propose(ids, budgets, floor);
    CHECK(together.offsets.size() == ids.size() + 1);
    for (std::size_t b = 0; b < ids.size(); ++b) {
      const Oracle::Sequence& sequence = oracle_.sequences().at(ids[b]);
      check_entry(together, b, sequence.group, sequence.text, budgets[b], floor);
      const Proposal alone = corpus_.propose(ids.subspan(b, 1), {&budgets[b], 1}, floor);
      CHECK(same(together, b, alone));
      const Proposal fresh = corpus_.query(sequence.group, sequence.text, budgets[b], floor);
      CHECK(same(together, b, fresh));
      oracle_.propose(ids[b], static_cast<std::uint32_t>(alone.tokens.size()));
    }
    return together;
  }

  void propose() { propose(draw_open(false)); }

  // As an engine does: part of a path of each tree comes true.
  void propose_and_extend() {
    const auto ids = draw_open(true);
    const Proposal proposal = propose(ids);
    std::vector<std::vector<Token>> added;
    for (std::size_t b = 0; b < ids.size(); ++b) {
      std::vector<Token> tokens;
      const auto begin = static_cast<std::size_t>(proposal.offsets[b]);
      const auto end = static_cast<std::size_t>(proposal.offsets[b + 1]);
      std::int32_t on_path = 0;
      for (std::size_t j = begin; j < end; ++j) {
        if (proposal.parents[j] != on_path || input_.below(4) == 0) continue;
        tokens.push_back(proposal.tokens[j]);
        on_path = static_cast<std::int32_t>(j - begin) + 1;
      }
      const auto own = input_.tokens(2);
      tokens.insert(tokens.end(), own.begin(), own.end());
      added.push_back(std::move(tokens));
    }
    extend(ids, added);
  }

  void query() {
    const auto group = input_.pick(std::array<std::uint64_t, 4>{0, 1, ~std::uint64_t{0}, 7});
    const auto text = input_.tokens(50);
    const auto budget = static_cast<std::int32_t>(input_.below(kMaxTreeNodes));
    check_entry(corpus_.query(group, text, budget, 0), 0, group, text, budget, 0);
  }

  void check_entry(const Proposal& proposal, std::size_t entry, std::uint64_t group,
                   std::span<const Token> text, std::int32_t budget, double floor) {
    check_tree(proposal, entry, budget, floor);
    oracle_.check_seen(proposal, entry, group, text);
    if (complete_ && options_.max_steps == kAmpleSteps && budget > 0 && floor == 0) {
      const bool drafted = proposal.offsets[entry + 1] > proposal.offsets[entry];
      CHECK(drafted == oracle_.anything_follows(group, text));
    }
  }

  void close() {
    if (oracle_.sequences().empty()) return;
    const std::int64_t id = oracle_.sequences().begin()->first;
    corpus_.close(id);
    oracle_.close(id);
  }

  void add_or_remove_external() {
    const std::string name(1, static_cast<char>('a' + input_.below(3)));
    if (oracle_.said().externals.contains(name)) {
      corpus_.remove_external(name);
      return oracle_.remove_external(name);
    }
    std::vector<Token> tokens;
    std::vector<std::int64_t> offsets{0};
    for (std::uint32_t documents = input_.below(4); documents > 0; --documents) {
      const auto document = input_.tokens(80);
      tokens.insert(tokens.end(), document.begin(), document.end());
      offsets.push_back(static_cast<std::int64_t>(tokens.size()));
    }
    corpus_.add_external(name, tokens, offsets);
    oracle_.add_external(name, tokens, offsets);
  }

  // Each changes nothing.
  void refused_calls() {
    const std::vector<Token> negative{1,
                                      input_.integer<Token>() | std::numeric_limits<Token>::min()};
    const std::vector<std::int64_t> unknown{-5}, end{0, 2};
    const std::vector<std::int32_t> budget{1};
    CHECK_REFUSED(corpus_.insert(negative, 0));
    CHECK_REFUSED(corpus_.open(-5, 0, negative));
    CHECK_REFUSED(corpus_.close(-5));
    CHECK_REFUSED(corpus_.propose(unknown, budget, 0));
    CHECK_REFUSED(corpus_.extend(unknown, {}, std::vector<std::int64_t>{0, 0}));
    CHECK_REFUSED(corpus_.add_external("z", negative, end));
    const std::vector<Token> large(kExternalBytes / sizeof(Token) + 1);
    CHECK_REFUSED(corpus_.add_external(
        "z", large, std::vector<std::int64_t>{0, static_cast<std::int64_t>(large.size())}));
    if (oracle_.sequences().empty()) return;
    const std::int64_t id = oracle_.sequences().begin()->first;
    const std::vector<std::int64_t> twice{id, id}, once{id};
    const std::vector<std::int32_t> wrong{input_.below(2) != 0 ? kMaxTreeNodes : -1};
    CHECK_REFUSED(corpus_.open(id, 0, {}));
    CHECK_REFUSED(corpus_.propose(once, wrong, 0));
    CHECK_REFUSED(corpus_.propose(twice, std::vector<std::int32_t>{1, 1}, 0));
    CHECK_REFUSED(corpus_.extend(twice, {}, std::vector<std::int64_t>{0, 0, 0}));
    CHECK_REFUSED(corpus_.extend(once, negative, end));
    CHECK_REFUSED(corpus_.extend(once, negative, unknown));
    const auto drafted = static_cast<std::int32_t>(oracle_.sequences().at(id).drafted);
    const std::vector<Token> fine{1, 2};
    for (const std::int32_t count : {-1, drafted + 1, std::numeric_limits<std::int32_t>::max(),
                                     std::numeric_limits<std::int32_t>::min()}) {
      CHECK_REFUSED(corpus_.extend(once, fine, end, std::vector<std::int32_t>{count}));
    }
    CHECK_REFUSED(corpus_.extend(once, fine, end, std::vector<std::int32_t>{0, 0}));
  }

  void save_or_load() {
    if (!saved_ || input_.below(2) == 0) {
      saved_ = std::make_unique<Saved>(Saved{saved(corpus_), oracle_.said(), complete_});
      Corpus copy(options_);
      load(copy, saved_->bytes);
      CHECK(copy.check().empty());
      CHECK(saved(copy) == saved_->bytes);
      const auto text = input_.tokens(40);
      CHECK(same(corpus_.query(1, text, 63, 0), 0, copy.query(1, text, 63, 0)));
      return;
    }
    load(corpus_, saved_->bytes);
    oracle_.load(saved_->said);
    complete_ = saved_->complete;
  }

  struct Saved {
    Bytes bytes;
    Oracle::Said said;
    bool complete;
  };

  Input& input_;
  const Options options_;
  Corpus corpus_{options_};
  Oracle oracle_;
  bool complete_ = true;  // nothing was dropped
  std::int64_t next_id_ = std::numeric_limits<std::int64_t>::min();
  std::unique_ptr<Saved> saved_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input({data, std::min(size, kMaxInput)});
  Session(input).run();
  return 0;
}
