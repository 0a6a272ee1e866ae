// Grows one draft tree from all that may come next.
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
  std::uint64_t mask;   // tree nodes on the path, root and node included
  double probability;   // that the node is accepted: the product along the path
  double prior;         // of this step alone, before calibration
  std::uint16_t cell;
};

// Best first: the next node is always the most probable one not yet in the tree, so the first n
// nodes are the tree of n nodes with the largest expected accept length. Ties fall to the child
// made first; children are made in the order of the candidates. Keeps its memory between calls.
class TreeBuilder {
 public:
  const std::vector<DraftNode>& build(const std::vector<Candidate>& candidates,
                                      std::int32_t max_nodes, const Calibration& calibration);

 private:
  // An occurrence that agrees with the path so far.
  struct Follower {
    Position position;  // of its next token
    std::uint32_t candidate;
  };
  // A token some followers of a node propose.
  struct Child {
    Token token;
    std::uint32_t count;
    std::uint32_t match;
    Source source;
    double weight;
  };
  // A child not yet in the tree.
  struct Pending {
    DraftNode node;
    std::uint32_t begin, end;  // followers of its parent
    std::uint32_t order;       // of making
  };

  void expand(const std::vector<Candidate>& candidates, std::int32_t tree_node,
              const DraftNode& node, std::uint32_t begin, std::uint32_t end,
              const Calibration& calibration);
  static bool worse(const Pending& a, const Pending& b);

  std::vector<DraftNode> nodes_;
  std::vector<Follower> followers_;
  std::vector<Child> children_;
  std::vector<Pending> heap_;
  std::uint32_t made_ = 0;
};

}  // namespace ngram

#endif  // NGRAM_NATIVE_TREE_BUILDER_H_
