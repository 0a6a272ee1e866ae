// The corpus by brute force, as far as a tree can be judged without knowing the estimates.
#ifndef NGRAM_NATIVE_TESTS_FUZZ_ORACLE_H_
#define NGRAM_NATIVE_TESTS_FUZZ_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proposal.h"
#include "types.h"

namespace ngram::fuzz {

// Keeps every token said in plain vectors and drops none.
class Oracle {
 public:
  struct Sequence {
    std::uint64_t group;
    std::vector<Token> text;
    std::size_t document;       // kNone: nothing said since the corpus forgot or was loaded
    std::uint32_t drafted = 0;  // nodes handed out since it last got tokens
  };

  void insert(std::span<const Token> tokens, std::optional<std::uint64_t> group);
  void open(std::int64_t id, std::uint64_t group, std::span<const Token> tokens);
  void extend(std::int64_t id, std::span<const Token> tokens);
  void propose(std::int64_t id, std::uint32_t nodes) { sequences_.at(id).drafted = nodes; }
  void close(std::int64_t id) { sequences_.erase(id); }
  void add_external(const std::string& name, std::span<const Token> tokens,
                    std::span<const std::int64_t> offsets);
  void remove_external(const std::string& name) { said_.externals.erase(name); }
  void reset();

  // Of what was said; open sequences are not part of it.
  struct Said {
    struct Document {
      std::optional<std::uint64_t> group;
      std::vector<Token> tokens;
    };
    std::vector<Document> documents;
    std::map<std::string, std::vector<Document>> externals;
    std::uint64_t num_tokens = 0;  // prompts that siblings share count once
  };
  const Said& said() const { return said_; }
  void load(const Said& said);

  const std::map<std::int64_t, Sequence>& sequences() const { return sequences_; }
  std::uint64_t num_tokens() const;

  // Every path of the entry came, in one document, after the end of `text`. So it must be whatever
  // part of the tokens the corpus still holds.
  void check_seen(const Proposal& proposal, std::size_t entry, std::uint64_t group,
                  std::span<const Token> text) const;
  // Something came after the end of `text`: while all tokens are held, something must be drafted.
  bool anything_follows(std::uint64_t group, std::span<const Token> text) const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  bool followed_by(std::uint64_t group, std::span<const Token> text,
                   std::span<const Token> path) const;
  void detach_sequences();

  Said said_;
  std::map<std::int64_t, Sequence> sequences_;
};

}  // namespace ngram::fuzz

#endif  // NGRAM_NATIVE_TESTS_FUZZ_ORACLE_H_
