// Builds an external corpus: collects its documents, then indexes them.
#ifndef NGRAM_NATIVE_EXTERNAL_BUILDER_H_
#define NGRAM_NATIVE_EXTERNAL_BUILDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "build_monitor.h"
#include "external_budget.h"
#include "external_index.h"
#include "mapped_array.h"
#include "types.h"

namespace ngram {

// Any thread may call any method. cancel(), take() and the counters never wait; the other methods
// wait for one another. A refused call throws std::invalid_argument. After a refused call, or a
// build that failed or was cancelled, there is nothing to publish.
class ExternalBuilder {
 public:
  explicit ExternalBuilder(std::shared_ptr<ExternalBudget> budget);

  // Adds documents: document d is tokens[offsets[d], offsets[d + 1]).
  void append(std::span<const Token> tokens, std::span<const std::int64_t> offsets);
  // Indexes the documents; to be called once, after the last of them. `proceed` is asked ten times
  // a second whether to go on. Returns false when cancelled.
  bool build(const std::function<bool()>& proceed);
  void cancel() { monitor_.cancel(); }

  std::uint64_t num_tokens() const { return num_tokens_; }
  std::uint64_t num_bytes() const { return monitor_.num_bytes(); }
  double fraction_indexed() const;  // in [0, 1]

  // Hands out the built index, once. Refused while build() runs: to wait would hold up the corpus.
  std::unique_ptr<ExternalIndex> take();
  void free();  // frees everything; nothing is left to publish

 private:
  void push(Token token);
  void release();
  MappedArray<Token> joined();

  static constexpr std::size_t kChunk = 1 << 16;  // tokens; pages not written yet cost nothing

  std::mutex mutex_;
  BuildMonitor monitor_;
  std::vector<MappedArray<Token>> chunks_;
  std::size_t text_size_ = 0;  // tokens and separators in the chunks
  bool closed_ = false;        // build() was called
  std::unique_ptr<ExternalIndex> index_;
  std::atomic<std::uint64_t> num_tokens_ = 0;
  std::atomic<bool> built_ = false;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_EXTERNAL_BUILDER_H_
