// The published external corpora, by name.
#ifndef NGRAM_NATIVE_EXTERNAL_CORPORA_H_
#define NGRAM_NATIVE_EXTERNAL_CORPORA_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "external_index.h"

namespace ngram {

// Not synchronised: the owner holds its lock around every call. No call takes longer for a larger
// corpus.
class ExternalCorpora {
 public:
  void check_free(const std::string& name) const;  // refuses a name that is taken
  void add(const std::string& name, std::unique_ptr<ExternalIndex> corpus);
  std::unique_ptr<ExternalIndex> remove(const std::string& name);  // for the caller to free

  // Moves the bytes of all corpora to another budget, even beyond its limit.
  void charge_to(const std::shared_ptr<ExternalBudget>& budget);

  std::vector<std::string> names() const;
  std::uint64_t num_tokens() const;
  std::uint64_t num_bytes() const;

  // By name in order, so that candidates come in the same order everywhere.
  const std::map<std::string, std::unique_ptr<ExternalIndex>>& by_name() const { return by_name_; }

 private:
  std::map<std::string, std::unique_ptr<ExternalIndex>> by_name_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_EXTERNAL_CORPORA_H_
