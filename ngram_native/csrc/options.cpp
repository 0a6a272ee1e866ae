#include "options.h"

#include <string>

#include "validation.h"

namespace ngram {

namespace {

constexpr std::uint64_t kMinBytes = 256 << 10;
constexpr std::uint32_t kMaxCandidates = 1024;

}  // namespace

Options checked(const Options& options) {
  if (options.max_bytes < kMinBytes) {
    refuse("max_bytes", std::to_string(options.max_bytes),
           "must be >= " + std::to_string(kMinBytes));
  }
  if (options.max_candidates < 1 || options.max_candidates > kMaxCandidates) {
    refuse("max_candidates", std::to_string(options.max_candidates),
           "must be in [1, " + std::to_string(kMaxCandidates) + "]");
  }
  if (options.max_steps < options.max_candidates) {
    refuse("max_steps", std::to_string(options.max_steps),
           "must be >= max_candidates=" + std::to_string(options.max_candidates));
  }
  if (options.vocab_size < 1 || options.vocab_size > std::int64_t{1} << 31) {
    refuse("vocab_size", std::to_string(options.vocab_size), "must be in [1, 2**31]");
  }
  return options;
}

}  // namespace ngram
