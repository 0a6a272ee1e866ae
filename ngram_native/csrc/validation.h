// Errors that name the field, the value and the remedy.
#ifndef NGRAM_NATIVE_VALIDATION_H_
#define NGRAM_NATIVE_VALIDATION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "types.h"

namespace ngram {

// Throws std::invalid_argument.
[[noreturn]] void refuse(const std::string& field, const std::string& value,
                         const std::string& remedy);

void check_tokens(std::span<const Token> tokens, std::int64_t vocab_size = std::int64_t{1} << 31);
void check_offsets(std::span<const std::int64_t> offsets, std::size_t entries, std::size_t tokens);
void check_min_probability(double value);
void check_budget(const std::string& field, std::int32_t budget);

}  // namespace ngram

#endif  // NGRAM_NATIVE_VALIDATION_H_
