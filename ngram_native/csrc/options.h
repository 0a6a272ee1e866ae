// The options of a corpus.
#ifndef NGRAM_NATIVE_OPTIONS_H_
#define NGRAM_NATIVE_OPTIONS_H_

#include <cstdint>
#include <string>

namespace ngram {

struct Options {
  std::uint64_t max_bytes;           // of the rollouts' log, its chain heads and the open sequences
  std::uint64_t max_external_bytes;  // of all external corpora together
  std::uint32_t max_candidates;      // at most this many occurrences per scope
  std::uint32_t max_steps;           // links followed per chain and query
  std::string vocabulary = {};       // names the tokenizer; files of another one are refused
  std::int64_t vocab_size = std::int64_t{1} << 31;  // tokens are below it
};

// Returns the options unchanged; throws std::invalid_argument where one is invalid.
Options checked(const Options& options);

}  // namespace ngram

#endif  // NGRAM_NATIVE_OPTIONS_H_
