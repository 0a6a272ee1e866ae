// Which branches of the corpus ran: a bit per pair of basic blocks that followed each other.
#ifndef NGRAM_NATIVE_TESTS_FUZZ_COVERAGE_H_
#define NGRAM_NATIVE_TESTS_FUZZ_COVERAGE_H_

namespace ngram::fuzz {

// Whether, since the last call, a pair ran that never had before. Code compiled with
// -fsanitize-coverage=trace-pc is seen.
bool saw_something_new();

}  // namespace ngram::fuzz

#endif  // NGRAM_NATIVE_TESTS_FUZZ_COVERAGE_H_
