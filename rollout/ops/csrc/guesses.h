// The likeliest tokens of a draft's rows, each with the probability that it is the target's sample.
// See rollout/ops/draft_guesses/reference.py, whose sums have another order.
#pragma once

#include "categorical.h"
#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
class RowGuesses {
 public:
  // scratch: of guess_scratch_bytes(vocab).
  RowGuesses(const GuessArgs& args, int64_t row, void* scratch)
      : args_(args),
        row_(row),
        tree_(args.trees[row]),
        before_(static_cast<double*>(scratch)),
        weights_(reinterpret_cast<float*>(before_ + guess_blocks(args.vocab) + 1)) {}

  void run() const {
    weigh();
    Candidate candidates[kMaxGuessCandidates];
    const int64_t wanted = args_.candidates < args_.vocab ? args_.candidates : args_.vocab;
    const double total = before_[guess_blocks(args_.vocab)];
    const int64_t count = total == total ? find(candidates, wanted) : 0;
    for (int64_t c = 0; c < count; ++c) value(candidates[c], total);
    int64_t* tokens = args_.tokens + row_ * args_.children;
    float* probs = args_.probs + row_ * args_.children;
    const float ratio = args_.ratios[level()];
    for (int64_t w = 0; w < args_.children; ++w) {
      if (w >= count) {  // there are too few, or the logits are NaN
        tokens[w] = 0;
        probs[w] = __builtin_nanf("");
        continue;
      }
      int64_t best = w;
      for (int64_t c = w + 1; c < count; ++c) {
        if (candidates[c].value > candidates[best].value) best = c;
      }
      const Candidate chosen = candidates[best];
      for (int64_t c = best; c > w; --c) candidates[c] = candidates[c - 1];
      tokens[w] = args_.token_ids == nullptr ? chosen.token : args_.token_ids[chosen.token];
      const float prob = chosen.value * ratio;
      probs[w] = prob > 1.0f ? 1.0f : prob;
    }
  }

 private:
  struct Candidate {
    int64_t token;
    float weight;
    float value;
  };

  int64_t level() const { return args_.levels == nullptr ? args_.level : args_.levels[row_]; }

  // exp((logit - max) / T) of all tokens, and the sums before each block and behind the last. NaN
  // where a logit is NaN or +inf, or all are -inf.
  void weigh() const {
    const T* logits = static_cast<const T*>(args_.logits) + row_ * args_.row_stride;
    const float maximum = row_max(logits, args_.vocab);
    const Vec inverse = broadcast(1.0f / args_.temperature[tree_]);
    before_[0] = 0;
    for (int64_t block = 0; block < guess_blocks(args_.vocab); ++block) {
      const int64_t begin = block * kVocabBlock, rest = args_.vocab - begin;
      const int64_t size = rest < kVocabBlock ? rest : kVocabBlock;
      Vec sum{};
      for_each_vector(size, [&](int64_t i, const auto& load, const auto&) {
        Vec weight = exp((load(logits + begin + i) - maximum) * inverse);
        for (int64_t lane = size - i; lane < kLanes; ++lane) weight[lane] = 0.0f;
        store(weights_ + begin + i, weight);
        sum += weight;
      });
      before_[block + 1] = before_[block] + static_cast<double>(reduce_add(sum));
    }
  }

  // The tokens of the largest weights, of equals the first.
  int64_t find(Candidate* candidates, int64_t wanted) const {
    int64_t count = 0;
    float least = -1.0f;  // of the candidates, once there are enough
    for (int64_t i = 0; i < args_.vocab; i += kLanes) {
      const Vec weights = load(weights_ + i);
      if (reduce_max(weights) <= least) continue;
      for (int64_t lane = 0; lane < kLanes && i + lane < args_.vocab; ++lane) {
        const float weight = weights[lane];
        if (count == wanted && weight <= least) continue;
        int64_t at = count < wanted ? count++ : wanted - 1;
        for (; at > 0 && weight > candidates[at - 1].weight; --at) {
          candidates[at] = candidates[at - 1];
        }
        candidates[at] = {i + lane, weight, 0.0f};
        if (count == wanted) least = candidates[wanted - 1].weight;
      }
    }
    return count;
  }

  // The sum of the weights up to a token, its own included.
  double sum_to(int64_t token) const {
    const int64_t block = token / kVocabBlock;
    float sum = 0;
    for (int64_t i = block * kVocabBlock; i <= token; ++i) sum += weights_[i];
    return before_[block] + static_cast<double>(sum);
  }

  // The token's probability, raised where its interval is near the noise.
  void value(Candidate& candidate, double total) const {
    const float prob = static_cast<float>(static_cast<double>(candidate.weight) / total);
    const float end = static_cast<float>(sum_to(candidate.token) / total);
    const float noise = args_.uniforms[tree_ * args_.levels_per_tree + level()];
    const float reach = args_.near[tree_];
    const float low = noise - reach > 0.0f ? noise - reach : 0.0f;
    const float high = noise + reach < 1.0f ? noise + reach : 1.0f;
    const float overlap = (end < high ? end : high) - (end - prob > low ? end - prob : low);
    const float near = overlap > 0.0f ? overlap / (high - low) : 0.0f;
    candidate.value = prob + args_.near_share * (near - prob);
  }

  const GuessArgs& args_;
  const int64_t row_, tree_;
  double* before_;
  float* weights_;
};

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
