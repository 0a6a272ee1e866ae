// What a corpus is made with.
#ifndef NGRAM_NATIVE_OPTIONS_H_
#define NGRAM_NATIVE_OPTIONS_H_

#include <cstdint>

namespace ngram {

struct Options {
  std::uint64_t max_bytes;           // of the rollouts' log, its chain heads and the open sequences
  std::uint64_t max_external_bytes;  // of all external corpora together
  std::uint32_t max_candidates;      // occurrences kept per scope
  std::uint32_t max_steps;           // links followed per chain and query
};

// The same, or a std::invalid_argument.
Options checked(const Options& options);

}  // namespace ngram

#endif  // NGRAM_NATIVE_OPTIONS_H_
