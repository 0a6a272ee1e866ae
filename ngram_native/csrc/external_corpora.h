// Named, frozen scopes beside the live one.
#ifndef NGRAM_NATIVE_EXTERNAL_CORPORA_H_
#define NGRAM_NATIVE_EXTERNAL_CORPORA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chained_log.h"
#include "types.h"

namespace ngram {

// Not synchronised: the owner holds its lock around every call but build(), which touches nothing
// shared and may take long.
class ExternalCorpora {
 public:
  explicit ExternalCorpora(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Documents d = tokens[offsets[d], offsets[d + 1]), already checked.
  static std::uint64_t bytes_needed(std::span<const std::int64_t> offsets);
  static std::unique_ptr<ChainedLog> build(std::span<const Token> tokens,
                                           std::span<const std::int64_t> offsets);
  static const std::vector<Chain>& chains();

  // Refuses a name that is taken and bytes that do not fit.
  void admit(const std::string& name, std::uint64_t bytes) const;
  void add(const std::string& name, std::unique_ptr<ChainedLog> corpus);
  std::unique_ptr<ChainedLog> remove(const std::string& name);  // for the caller to free

  std::vector<std::string> names() const;
  std::uint64_t num_tokens() const;
  std::uint64_t num_bytes() const;

  // By name in order, so that candidates come in the same order everywhere.
  const std::map<std::string, std::unique_ptr<ChainedLog>>& by_name() const { return by_name_; }

 private:
  std::uint64_t max_bytes_;
  std::map<std::string, std::unique_ptr<ChainedLog>> by_name_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_EXTERNAL_CORPORA_H_
