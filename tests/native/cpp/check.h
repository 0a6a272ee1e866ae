// Checks that say where they failed and abort, so that a fuzzer keeps the input.
#ifndef NGRAM_NATIVE_TESTS_CHECK_H_
#define NGRAM_NATIVE_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

#define CHECK_REFUSED(expression)            \
  do {                                       \
    bool refused = false;                    \
    try {                                    \
      (void)(expression);                    \
    } catch (const std::invalid_argument&) { \
      refused = true;                        \
    }                                        \
    CHECK(refused && #expression);           \
  } while (false)

#endif  // NGRAM_NATIVE_TESTS_CHECK_H_
