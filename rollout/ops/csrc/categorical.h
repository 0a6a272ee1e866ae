// Sampling, logprobs and entropy of softmax(logits / temperature).
//
// Weights are exp((logit - max) / T), summed in float32 within fixed blocks of the vocabulary and
// in float64 across blocks. A row with NaN, +inf or nothing above -inf has a total that is NaN, and
// through it a logprob that is NaN.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
inline float row_max(const T* logits, int64_t vocab) {
  Vec largest = broadcast(-__builtin_inff());
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) largest = max(largest, load(logits + i));
  float result = reduce_max(largest);
  for (; i < vocab; ++i) {
    const float x = load_partial(logits + i, 1)[0];
    result = result > x ? result : x;
  }
  return result;
}

template <typename T>
struct Softmax {
  const T* logits;
  int64_t vocab;
  float maximum;
  float temperature;  // never 0: greedy rows report at 1
  double total = 0;
  float threshold = -__builtin_inff();  // where kCut, logits below it weigh nothing

  Softmax(const CategoricalArgs& args, int64_t row)
      : logits(static_cast<const T*>(args.logits) + row * args.row_stride),
        vocab(args.vocab),
        maximum(row_max(logits, vocab)),
        temperature(args.temperature[row] == 0 ? 1.0f : args.temperature[row]) {}

  int64_t block_end(int64_t begin) const {
    return begin + kVocabBlock < vocab ? begin + kVocabBlock : vocab;
  }

  template <bool kCut = false>
  Vec shifted(Vec logit) const {
    const Vec z = (logit - maximum) / broadcast(temperature);
    if constexpr (!kCut) return z;
    return logit < broadcast(threshold) ? broadcast(-__builtin_inff()) : z;
  }

  // Calls f(first, shifted logits) for every vector of a block, absent lanes -inf.
  template <bool kCut = false, typename Function>
  void for_each_in_block(int64_t begin, const Function& f) const {
    const int64_t end = block_end(begin);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) f(i, shifted<kCut>(load(logits + i)));
    if (i < end) {
      Vec last = shifted<kCut>(load_partial(logits + i, end - i));
      for (int64_t lane = end - i; lane < kLanes; ++lane) last[lane] = -__builtin_inff();
      f(i, last);
    }
  }

  template <bool kCut = false>
  float block_sum(int64_t begin) const {
    Vec sum{};
    for_each_in_block<kCut>(begin, [&](int64_t, Vec z) { sum += exp(z); });
    return reduce_add(sum);
  }

  // Of all blocks, each of which is written down too.
  template <bool kCut = false>
  double sum(float* block_sums) const {
    double result = 0;
    for (int64_t begin = 0; begin < vocab; begin += kVocabBlock) {
      const float of_block = block_sum<kCut>(begin);
      block_sums[begin / kVocabBlock] = of_block;
      result += static_cast<double>(of_block);
    }
    return result;
  }

  float logprob(int64_t token) const {
    const Vec z = shifted(load_partial(logits + token, 1));
    return static_cast<float>(static_cast<double>(z[0]) - __builtin_log(total));
  }

  // First index of the largest logit.
  int64_t greedy() const {
    for (int64_t begin = 0; begin < vocab; begin += kVocabBlock) {
      IntVec found{};
      for_each_in_block(begin, [&](int64_t, Vec z) { found |= z == 0.0f; });
      for (int lane = 0; lane < kLanes; ++lane) {
        if (!found[lane]) continue;
        int64_t token = begin;
        while (load_partial(logits + token, 1)[0] != maximum) ++token;
        return token;
      }
    }
    return -1;
  }

  // First index whose cumulative weight exceeds the target. Where rounding leaves none, the last
  // one of positive weight.
  template <bool kCut = false>
  int64_t sample(double target, const float* block_sums) const {
    double cumulative = 0;
    int64_t chosen = 0;
    double before = 0;
    for (int64_t block = 0; block * kVocabBlock < vocab; ++block) {
      if (block_sums[block] == 0) continue;
      chosen = block;
      before = cumulative;
      cumulative += static_cast<double>(block_sums[block]);
      if (cumulative > target) break;
    }
    float weights[kVocabBlock + kLanes];
    const int64_t begin = chosen * kVocabBlock;
    for_each_in_block<kCut>(begin, [&](int64_t i, Vec z) { store(weights + i - begin, exp(z)); });
    int64_t token = begin;
    for (int64_t i = begin; i < block_end(begin); ++i) {
      const float weight = weights[i - begin];
      if (weight == 0) continue;
      token = i;
      before += static_cast<double>(weight);
      if (before > target) break;
    }
    return token;
  }
};

template <typename T>
void categorical_row(const CategoricalArgs& args, int64_t row, float* block_sums) {
  Softmax<T> softmax(args, row);
  softmax.total = softmax.sum(block_sums);
  if (softmax.total != softmax.total) {
    args.tokens[row] = -1;
    args.out[row] = __builtin_nanf("");
    return;
  }
  int64_t token;
  if (args.temperature[row] == 0) {
    token = softmax.greedy();
  } else if (args.threshold == nullptr) {
    token = softmax.sample(args.uniform[row] * softmax.total, block_sums);
  } else {
    softmax.threshold = args.threshold[row];
    const double kept = softmax.template sum<true>(block_sums);
    token = softmax.template sample<true>(args.uniform[row] * kept, block_sums);
  }
  args.tokens[row] = token;
  args.out[row] = softmax.logprob(token);
}

template <typename T>
void token_logprobs_row(const CategoricalArgs& args, int64_t row, float* block_sums) {
  Softmax<T> softmax(args, row);
  softmax.total = softmax.sum(block_sums);
  for (int64_t i = row * args.tokens_per_row; i < (row + 1) * args.tokens_per_row; ++i) {
    const int64_t token = args.given_tokens[i];
    args.out[i] = token < 0 ? __builtin_nanf("") : softmax.logprob(token);
  }
}

// log(total) - sum(weight * z) / total, z the shifted logits.
template <typename T>
void entropy_row(const CategoricalArgs& args, int64_t row) {
  Softmax<T> softmax(args, row);
  double weighted = 0;
  for (int64_t begin = 0; begin < args.vocab; begin += kVocabBlock) {
    Vec weight_sum{}, product_sum{};
    softmax.for_each_in_block(begin, [&](int64_t, Vec z) {
      const Vec weight = exp(z);
      weight_sum += weight;
      product_sum += weight == 0.0f ? Vec{} : weight * z;  // 0 * -inf is 0 here
    });
    softmax.total += static_cast<double>(reduce_add(weight_sum));
    weighted += static_cast<double>(reduce_add(product_sum));
  }
  args.out[row] = static_cast<float>(__builtin_log(softmax.total) - weighted / softmax.total);
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
