#include "corpus.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "validation.h"

namespace ngram {

namespace {

// Trees are grown to at least this size, whatever the budget, and all their nodes are learned from:
// an estimate that sank below the caller's min_probability must be able to rise again.
constexpr std::int32_t kJudgedNodes = 8;

// A 32nd of max_bytes is set aside for open sequences, and at least this much.
constexpr std::uint64_t kMinReserve = 64 << 10;

// Set aside for the Corpus object. A constant, because its real size differs between standard
// libraries and the same max_bytes must hold the same number of pages everywhere.
constexpr std::uint64_t kOwnBytes = 112 << 10;
static_assert(sizeof(Corpus) <= kOwnBytes);

// The most that an open sequence takes: itself, its guesses, the map's node (value and link), and a
// word of the allocator for each block.
constexpr std::uint64_t kSequenceBytes = 2048;
static_assert(sizeof(Sequence) + 8 * sizeof(void*) + kMaxTreeNodes * sizeof(Guess) <=
              kSequenceBytes);

std::uint64_t reserve_bytes(std::uint64_t max_bytes) {
  return std::max(max_bytes / 32, kMinReserve);
}

std::int32_t nodes_grown(std::int32_t budget) { return std::max(budget, kJudgedNodes); }

// How many sequences of a batch are searched together, so that their cache misses overlap.
constexpr std::size_t kTogether = 16;

// How many tokens of a sequence have their slots prefetched together.
constexpr std::size_t kAppendedTogether = 16;

void check_verified(std::span<const std::int32_t> verified,
                    const std::vector<Sequence*>& sequences) {
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    const std::size_t drafted = sequences[b]->drafted;
    if (verified[b] < 0 || static_cast<std::size_t>(verified[b]) > drafted) {
      refuse("verified[" + std::to_string(b) + "]", std::to_string(verified[b]),
             "must be in [0, " + std::to_string(drafted) +
                 "], as so many nodes were proposed for the sequence since its last tokens");
    }
  }
}

}  // namespace

Corpus::Corpus(const Options& options)
    : options_(checked(options)),
      live_(make_live()),
      external_budget_(std::make_shared<ExternalBudget>(options.max_external_bytes)),
      matcher_(options.max_candidates, options.max_steps) {}

std::unique_ptr<ChainedLog> Corpus::make_live() const {
  const auto& chains = Matcher::live_chains();
  const std::uint32_t slots = ChainedLog::part_slots_for(chains, options_.max_bytes / 8);
  const std::uint64_t reserve = reserve_bytes(options_.max_bytes) + kOwnBytes;
  const std::uint64_t pages =
      (options_.max_bytes - ChainedLog::table_bytes(chains, slots) - reserve) /
      TokenLog::page_bytes(static_cast<std::uint32_t>(chains.size()));
  return std::make_unique<ChainedLog>(
      chains,
      static_cast<std::uint32_t>(std::min<std::uint64_t>(pages, TokenLog::kMaxCapacityPages)),
      slots);
}

std::size_t Corpus::max_sequences() const {
  return static_cast<std::size_t>(reserve_bytes(options_.max_bytes) / kSequenceBytes);
}

Sequence& Corpus::find(std::int64_t sequence_id) {
  const auto found = sequences_.find(sequence_id);
  if (found == sequences_.end()) {
    refuse("sequence_id", std::to_string(sequence_id), "is not open; open() it first");
  }
  return *found->second;
}

std::vector<Sequence*> Corpus::find_all(std::span<const std::int64_t> sequence_ids) {
  ++calls_;
  std::vector<Sequence*> sequences;
  sequences.reserve(sequence_ids.size());
  for (const std::int64_t id : sequence_ids) {
    sequences.push_back(&find(id));
    if (std::exchange(sequences.back()->named_by, calls_) == calls_) {
      refuse("sequence_ids", std::to_string(id), "is named twice in one call");
    }
  }
  return sequences;
}

void Corpus::insert(std::span<const Token> tokens, std::optional<std::uint64_t> group) {
  check_tokens(tokens, options_.vocab_size);
  const std::scoped_lock lock(mutex_);
  live_->reserve(tokens.size(), 1);
  Cursor cursor{.group = group.value_or(0), .has_group = group.has_value()};
  Context context;
  for (const Token token : tokens) {
    live_->append(cursor, token, context.view(), policy_);
    context.push(token);
  }
  totals_.inserted_tokens += tokens.size();
}

void Corpus::open(std::int64_t sequence_id, std::uint64_t group, std::span<const Token> tokens,
                  std::uint32_t age) {
  check_tokens(tokens, options_.vocab_size);
  const std::scoped_lock lock(mutex_);
  if (sequences_.contains(sequence_id)) {
    refuse("sequence_id", std::to_string(sequence_id), "is open already; close() it first");
  }
  if (sequences_.size() >= max_sequences()) {
    refuse("sequence_id", std::to_string(sequence_id),
           "is one more than the " + std::to_string(max_sequences()) +
               " open sequences that max_bytes=" + std::to_string(options_.max_bytes) +
               " has room for; close() some or raise it");
  }
  auto opened = std::make_unique<Sequence>();
  opened->cursor = Cursor{.group = group, .has_group = true};
  const std::size_t held = live_->follow(opened->cursor, tokens);
  live_->reserve(tokens.size() - held, 1);
  Sequence* const sequence = sequences_.emplace(sequence_id, std::move(opened)).first->second.get();
  // From here on nothing can fail.
  sequence->context.push(tokens.first(held));
  append(*sequence, tokens.subspan(held), policy_of(age));
  totals_.inserted_tokens += tokens.size() - held;
}

void Corpus::extend(std::span<const std::int64_t> sequence_ids, std::span<const Token> tokens,
                    std::span<const std::int64_t> offsets,
                    std::optional<std::span<const std::int32_t>> verified, std::uint32_t age) {
  check_tokens(tokens, options_.vocab_size);
  check_offsets(offsets, sequence_ids.size(), tokens.size());
  if (verified && verified->size() != sequence_ids.size()) {
    refuse("len(verified)", std::to_string(verified->size()),
           "must be len(sequence_ids)=" + std::to_string(sequence_ids.size()));
  }
  const std::scoped_lock lock(mutex_);
  const std::vector<Sequence*> sequences = find_all(sequence_ids);
  if (verified) check_verified(*verified, sequences);
  live_->reserve(tokens.size(), sequences.size());
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    Sequence& sequence = *sequences[b];
    const auto fresh = tokens.subspan(static_cast<std::size_t>(offsets[b]),
                                      static_cast<std::size_t>(offsets[b + 1] - offsets[b]));
    if (fresh.empty()) continue;
    const std::size_t count =
        verified ? static_cast<std::size_t>((*verified)[b]) : sequence.drafted;
    totals_.matched_nodes += sequence.judge(fresh, count, calibration_);
    append(sequence, fresh, policy_of(age));
  }
  totals_.inserted_tokens += tokens.size();
}

// Every token writes to several slots of a table larger than any cache, so the slots of several
// tokens are prefetched before the first of them is written.
void Corpus::append(Sequence& sequence, std::span<const Token> tokens, std::uint32_t policy) {
  for (std::size_t begin = 0; begin < tokens.size(); begin += kAppendedTogether) {
    const auto part = tokens.subspan(begin, std::min(kAppendedTogether, tokens.size() - begin));
    Context ahead = sequence.context;
    for (const Token token : part) {
      live_->prefetch_append(sequence.cursor, ahead.view());
      ahead.push(token);
    }
    for (const Token token : part) {
      live_->append(sequence.cursor, token, sequence.context.view(), policy);
      sequence.context.push(token);
    }
  }
}

const std::vector<DraftNode>& Corpus::grow(const Candidates& candidates, std::int32_t budget) {
  return builder_.build(candidates, nodes_grown(budget), calibration_);
}

Proposal Corpus::propose(std::span<const std::int64_t> sequence_ids,
                         std::span<const std::int32_t> budgets, double min_probability) {
  check_min_probability(min_probability);
  if (budgets.size() != sequence_ids.size()) {
    refuse("len(budgets)", std::to_string(budgets.size()),
           "must be len(sequence_ids)=" + std::to_string(sequence_ids.size()));
  }
  for (std::size_t b = 0; b < budgets.size(); ++b) {
    if (budgets[b] < 0 || budgets[b] >= kMaxTreeNodes) {
      check_budget("budgets[" + std::to_string(b) + "]", budgets[b]);
    }
  }
  const std::scoped_lock lock(mutex_);
  const std::vector<Sequence*> sequences = find_all(sequence_ids);
  Proposal out;
  out.reserve(budgets.size(), std::accumulate(budgets.begin(), budgets.end(), std::size_t{0}));
  for (std::size_t begin = 0; begin < sequences.size(); begin += kTogether) {
    const std::size_t end = std::min(begin + kTogether, sequences.size());
    queries_.clear();
    std::int32_t depth = 0;
    for (std::size_t b = begin; b < end; ++b) {
      if (budgets[b] > 0) {
        queries_.push_back(Query{sequences[b]->context.view(), sequences[b]->cursor.group});
        depth = std::max(depth, nodes_grown(budgets[b]));
      }
    }
    auto candidates =
        matcher_.gather(scopes(), queries_, static_cast<std::uint32_t>(depth)).begin();
    for (std::size_t b = begin; b < end; ++b) {
      std::vector<Guess>& guesses = sequences[b]->guesses;
      guesses.clear();
      if (budgets[b] == 0) {
        sequences[b]->drafted = out.add({}, 0, min_probability);
        continue;
      }
      const std::vector<DraftNode>& nodes = grow(*candidates++, budgets[b]);
      for (const DraftNode& node : nodes) {
        guesses.push_back(Guess{node.token, static_cast<std::uint8_t>(node.parent),
                                static_cast<std::uint8_t>(node.depth), node.basis, node.product});
      }
      sequences[b]->drafted = out.add(nodes, budgets[b], min_probability);
    }
  }
  totals_.proposals += sequences.size();
  totals_.proposed_nodes += out.tokens.size();
  return out;
}

Proposal Corpus::query(std::uint64_t group, std::span<const Token> tokens, std::int32_t budget,
                       double min_probability) {
  check_tokens(tokens, options_.vocab_size);
  check_budget("budget", budget);
  check_min_probability(min_probability);
  Context context;
  context.push(tokens);
  const Query query{context.view(), group};
  Proposal out;
  const std::scoped_lock lock(mutex_);
  const auto depth = static_cast<std::uint32_t>(nodes_grown(budget));
  const Candidates& candidates = matcher_.gather(scopes(), {&query, 1}, depth).front();
  out.add(grow(candidates, budget), budget, min_probability);
  return out;
}

void Corpus::close(std::int64_t sequence_id) {
  const std::scoped_lock lock(mutex_);
  find(sequence_id);
  sequences_.erase(sequence_id);
}

void Corpus::set_weight_version(std::int64_t version) {
  const std::scoped_lock lock(mutex_);
  if (version == weight_version_) return;
  weight_version_ = version;
  ++policy_;
  calibration_.decay();
}

void Corpus::add_external(const std::string& name, std::span<const Token> tokens,
                          std::span<const std::int64_t> offsets) {
  {
    const std::scoped_lock lock(mutex_);
    externals_.check_free(name);
  }
  ExternalBuilder builder(external_budget_);
  builder.append(tokens, offsets);
  builder.build({});
  publish_external(name, builder);  // checks the name again: another thread may have taken it
}

void Corpus::publish_external(const std::string& name, ExternalBuilder& builder) {
  const std::scoped_lock lock(mutex_);
  externals_.check_free(name);
  externals_.add(name, builder.take());
}

std::unique_ptr<ExternalIndex> Corpus::withdraw_external(const std::string& name) {
  const std::scoped_lock lock(mutex_);
  return externals_.remove(name);
}

std::vector<std::string> Corpus::external_names() const {
  const std::scoped_lock lock(mutex_);
  return externals_.names();
}

std::map<std::string, ExternalSize> Corpus::external_sizes() const {
  std::map<std::string, ExternalSize> sizes;
  const std::scoped_lock lock(mutex_);
  for (const auto& [name, corpus] : externals_.by_name()) {
    sizes.emplace(name, ExternalSize{corpus->num_tokens(), corpus->num_bytes()});
  }
  return sizes;
}

void Corpus::detach_sequences() {
  for (auto& [id, sequence] : sequences_) {
    sequence->guesses.clear();
    sequence->cursor.last = kNoPosition;
    sequence->cursor.page = kNoPage;
  }
}

void Corpus::reset() {
  auto empty = make_live();
  const std::scoped_lock lock(mutex_);
  live_.swap(empty);
  calibration_ = Calibration();
  detach_sequences();
}

std::string Corpus::check() const {
  const std::scoped_lock lock(mutex_);
  if (std::string reason = live_->check(options_.vocab_size); !reason.empty()) {
    return "live: " + reason;
  }
  for (const auto& [name, external] : externals_.by_name()) {
    if (std::string reason = external->check(); !reason.empty()) {
      return "external '" + name + "': " + reason;
    }
  }
  for (const auto& [id, sequence] : sequences_) {
    const Cursor& cursor = sequence->cursor;
    if (cursor.page == kNoPage || !live_->log().alive(cursor.page)) continue;
    const PageHeader& page = live_->log().header(cursor.page);
    if (cursor.last != cursor.page * kPageTokens + page.used - 1 || page.group != cursor.group) {
      return "sequence " + std::to_string(id) + ": does not end where its page does";
    }
  }
  return {};
}

std::uint64_t Corpus::bookkeeping_bytes() const {
  std::uint64_t bytes = sizeof(Corpus) + sequences_.bucket_count() * sizeof(void*);
  for (const auto& [id, sequence] : sequences_) {
    // The map's node holds its value and a link; the allocator adds a word to each block.
    bytes += sizeof(Sequence) + 5 * sizeof(void*) + sequence->guesses.capacity() * sizeof(Guess);
  }
  return bytes;
}

std::uint64_t Corpus::scratch_bytes() const {
  return matcher_.num_bytes() + builder_.num_bytes() + queries_.capacity() * sizeof(Query);
}

std::uint64_t Corpus::num_tokens() const {
  const std::scoped_lock lock(mutex_);
  return live_->log().num_tokens() + externals_.num_tokens();
}

std::uint64_t Corpus::num_bytes() const {
  const std::scoped_lock lock(mutex_);
  return live_->num_bytes() + external_budget_->used() + bookkeeping_bytes();
}

std::map<std::string, double> Corpus::counters() const {
  const std::scoped_lock lock(mutex_);
  const auto number = [](auto value) { return static_cast<double>(value); };
  return {
      {"live_tokens", number(live_->log().num_tokens())},
      {"live_bytes", number(live_->num_bytes())},
      {"dropped_tokens", number(live_->log().dropped_tokens())},
      {"inserted_tokens", number(totals_.inserted_tokens)},
      {"external_corpora", number(externals_.by_name().size())},
      {"external_tokens", number(externals_.num_tokens())},
      {"external_bytes", number(external_budget_->used())},
      {"open_sequences", number(sequences_.size())},
      {"bookkeeping_bytes", number(bookkeeping_bytes())},
      {"scratch_bytes", number(scratch_bytes())},
      {"weight_version", number(weight_version_)},
      {"proposals", number(totals_.proposals)},
      {"proposed_nodes", number(totals_.proposed_nodes)},
      {"matched_nodes", number(totals_.matched_nodes)},
  };
}

}  // namespace ngram
