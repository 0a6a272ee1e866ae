// The corpus: the tokens of all rollouts so far, and drafts proposed from them.
#ifndef NGRAM_NATIVE_CORPUS_H_
#define NGRAM_NATIVE_CORPUS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "calibration.h"
#include "chained_log.h"
#include "external_budget.h"
#include "external_builder.h"
#include "external_corpora.h"
#include "fork_guard.h"
#include "matcher.h"
#include "options.h"
#include "proposal.h"
#include "sequence.h"
#include "tree_builder.h"
#include "types.h"

namespace ngram {

class ByteReader;
class ByteWriter;

struct ExternalSize {
  std::uint64_t num_tokens;
  std::uint64_t num_bytes;
};

// Every public method may be called from any thread: it holds one mutex for the whole call. A call
// that throws has changed nothing. Mistakes of the caller are thrown as std::invalid_argument.
class Corpus {
 public:
  explicit Corpus(const Options& options);

  void insert(std::span<const Token> tokens, std::optional<std::uint64_t> group);
  // Begins a sequence. `age`, here and below: how many weight versions ago the tokens were sampled.
  void open(std::int64_t sequence_id, std::uint64_t group, std::span<const Token> tokens,
            std::uint32_t age = 0);
  // Appends the tokens [offsets[b], offsets[b + 1]) to sequence b. verified[b] is how many nodes of
  // its last proposal were verified, counted from the first; all of them without `verified`. A
  // sequence without new tokens is left as it is.
  void extend(std::span<const std::int64_t> sequence_ids, std::span<const Token> tokens,
              std::span<const std::int64_t> offsets,
              std::optional<std::span<const std::int32_t>> verified = std::nullopt,
              std::uint32_t age = 0);
  Proposal propose(std::span<const std::int64_t> sequence_ids,
                   std::span<const std::int32_t> budgets, double min_probability);
  // The draft for a sequence that ends with `tokens`. Inserts and remembers nothing.
  Proposal query(std::uint64_t group, std::span<const Token> tokens, std::int32_t budget,
                 double min_probability);
  void close(std::int64_t sequence_id);
  std::size_t max_sequences() const;  // how many can be open together
  void set_weight_version(std::int64_t version);

  // Builds and publishes in one call. Document d is tokens[offsets[d], offsets[d + 1]).
  void add_external(const std::string& name, std::span<const Token> tokens,
                    std::span<const std::int64_t> offsets);
  // Makes a built corpus visible as a whole, in constant time.
  void publish_external(const std::string& name, ExternalBuilder& builder);
  // Takes a corpus out of use, in constant time. The caller frees its memory.
  std::unique_ptr<ExternalIndex> withdraw_external(const std::string& name);
  void remove_external(const std::string& name) { withdraw_external(name); }
  std::vector<std::string> external_names() const;
  std::map<std::string, ExternalSize> external_sizes() const;
  std::shared_ptr<ExternalBudget> external_budget() const { return external_budget_; }

  void reset();
  void save(ByteWriter& writer) const;
  void load(ByteReader& reader);

  std::string check() const;  // empty when consistent, else what is wrong
  std::uint64_t num_tokens() const;
  std::uint64_t num_bytes() const;
  std::map<std::string, double> counters() const;

 private:
  struct Totals {
    std::uint64_t inserted_tokens = 0;
    std::uint64_t proposals = 0;
    std::uint64_t proposed_nodes = 0;
    std::uint64_t matched_nodes = 0;
  };

  // The caller holds the mutex.
  Sequence& find(std::int64_t sequence_id);
  std::vector<Sequence*> find_all(std::span<const std::int64_t> sequence_ids);
  void append(Sequence& sequence, std::span<const Token> tokens, std::uint32_t policy);
  const std::vector<DraftNode>& grow(const Candidates& candidates, std::int32_t budget);
  Scopes scopes() const { return Scopes{*live_, externals_, policy_}; }
  std::uint32_t policy_of(std::uint32_t age) const { return policy_ - std::min(age, policy_); }
  void detach_sequences();
  std::uint64_t bookkeeping_bytes() const;
  std::uint64_t scratch_bytes() const;  // buffers reused between calls; not part of max_bytes

  std::unique_ptr<ChainedLog> make_live() const;

  const Options options_;
  mutable std::mutex mutex_;
  std::unique_ptr<ChainedLog> live_;
  const std::shared_ptr<ExternalBudget> external_budget_;
  ExternalCorpora externals_;
  std::unordered_map<std::int64_t, std::unique_ptr<Sequence>> sequences_;
  Calibration calibration_;
  std::int64_t weight_version_ = 0;
  std::uint32_t policy_ = 0;  // counts changes of the weight version
  std::uint64_t calls_ = 0;
  Totals totals_;
  Matcher matcher_;
  std::vector<Query> queries_;
  TreeBuilder builder_;
  ForkGuard fork_guard_{mutex_};
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_CORPUS_H_
