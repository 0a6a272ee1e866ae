#include "validation.h"

#include <stdexcept>

namespace ngram {

void refuse(const std::string& field, const std::string& value, const std::string& remedy) {
  throw std::invalid_argument(field + "=" + value + ": " + remedy);
}

void check_tokens(std::span<const Token> tokens, std::int64_t vocab_size) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0) {
      refuse("tokens[" + std::to_string(i) + "]", std::to_string(tokens[i]), "must be >= 0");
    }
    if (tokens[i] >= vocab_size) {
      refuse("tokens[" + std::to_string(i) + "]", std::to_string(tokens[i]),
             "must be below vocab_size=" + std::to_string(vocab_size));
    }
  }
}

void check_offsets(std::span<const std::int64_t> offsets, std::size_t entries, std::size_t tokens) {
  if (offsets.size() != entries + 1) {
    refuse("len(offsets)", std::to_string(offsets.size()),
           "must be " + std::to_string(entries + 1) + ", one more than there are entries");
  }
  if (offsets.front() != 0) refuse("offsets[0]", std::to_string(offsets.front()), "must be 0");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      refuse("offsets[" + std::to_string(i) + "]", std::to_string(offsets[i]),
             "must not be below the offset before it");
    }
  }
  if (offsets.back() != static_cast<std::int64_t>(tokens)) {
    refuse("offsets[-1]", std::to_string(offsets.back()),
           "must be len(tokens)=" + std::to_string(tokens));
  }
}

void check_min_probability(double value) {
  if (!(value >= 0.0 && value <= 1.0)) {
    refuse("min_probability", std::to_string(value), "must be in [0, 1]");
  }
}

void check_budget(const std::string& field, std::int32_t budget) {
  if (budget < 0 || budget >= kMaxTreeNodes) {
    refuse(field, std::to_string(budget),
           "must be in [0, " + std::to_string(kMaxTreeNodes - 1) + "]");
  }
}

}  // namespace ngram
