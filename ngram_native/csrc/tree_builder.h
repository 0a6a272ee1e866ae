// Grows one draft tree from the candidates of a query.
#ifndef NGRAM_NATIVE_TREE_BUILDER_H_
#define NGRAM_NATIVE_TREE_BUILDER_H_

#include <cstdint>
#include <vector>

#include "calibration.h"
#include "candidate.h"
#include "types.h"

namespace ngram {

// A node of a tree. Node j of a draft is tree node j + 1; the root, tree node 0, is not stored.
struct DraftNode {
  Token token;
  std::int32_t parent;  // tree numbering
  std::int32_t depth;   // the root has 0
  Source source;        // of its longest match
  StepBasis basis;
  float product;       // of the estimates of the steps along its path
  double probability;  // that the node is accepted; at most its parent's
  std::uint64_t mask;  // tree nodes on the path, root and node included
};

// Grows best first: the next node is always the most probable one not yet in the tree. So the first
// n nodes are the tree of n nodes with the largest expected accept length. Among equals the child
// made first wins, and children are made in the order of the candidates. Memory is kept between
// calls.
class TreeBuilder {
 public:
  // Returns at most max_nodes nodes, no deeper than the candidates' depth.
  const std::vector<DraftNode>& build(const Candidates& candidates, std::int32_t max_nodes,
                                      const Calibration& calibration);

  std::uint64_t num_bytes() const {  // reused between calls
    return nodes_.capacity() * sizeof(DraftNode) +
           (undivided_.capacity() + followers_.capacity()) * sizeof(Follower) +
           pending_.capacity() * sizeof(Pending) + heap_.capacity() * sizeof(Rank);
  }

 private:
  // A candidate that agrees with the path so far, and its next token.
  struct Follower {
    Token token;
    std::uint32_t candidate;
  };
  // A child that is not in the tree yet, and the candidates that propose it.
  struct Pending {
    Token token;
    std::int32_t parent;
    StepBasis basis;
    float product;
    Source source;
    std::uint32_t begin, end;  // of followers_
  };
  struct Rank {
    double probability;
    std::uint32_t pending;  // in the order of making
  };

  void add_children(const Candidates& candidates, const Calibration& calibration,
                    std::int32_t tree_node);
  static bool worse(const Rank& a, const Rank& b);

  std::vector<DraftNode> nodes_;
  std::size_t num_undivided_ = 0;
  std::size_t num_followers_ = 0;
  std::vector<Follower> undivided_;  // followers of the node being expanded
  std::vector<Follower> followers_;  // of each pending child
  std::vector<Pending> pending_;
  std::vector<Rank> heap_;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_TREE_BUILDER_H_
