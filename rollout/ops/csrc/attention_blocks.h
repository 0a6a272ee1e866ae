// The inner loops of attention: keys transposed to float32, scores and value sums in register
// blocks, the softmax's exponentials.
//
// Exactness. Every score is one chain of fused multiply-adds over head_dim, every output element
// one chain over the row's keys in position order, and the sum of a row's exponentials puts a key
// in a lane by its position alone. Register blocks of different sizes are the same chains beside
// one another, so a row's bits depend on its own query and keys and on nothing it is computed with.
#pragma once

#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

// Register block: kBlockRows query heads by kBlockVecs vectors of keys, or of value dimensions.
constexpr int kBlockRows = 6;
constexpr int kBlockVecs = kLanes == 16 ? 4 : 2;
constexpr int kKeyBlock = kBlockVecs * kLanes;
constexpr int kPrefetchRows = 16;

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Elements 2i and 2i + 1 of a row of 16-bit elements, from the 32-bit word that holds both.
template <typename T>
inline Vec even_element(BitsVec word) {
  return widen<T>(low_halves(word));
}
template <>
inline Vec even_element<BFloat16>(BitsVec word) {
  return bit_cast<Vec>(word << 16);
}
template <typename T>
inline Vec odd_element(BitsVec word) {
  return widen<T>(low_halves(word >> 16));
}
template <>
inline Vec odd_element<BFloat16>(BitsVec word) {
  return bit_cast<Vec>(word & 0xffff0000);
}

// The rows of some slots in a pool, for one head.
template <typename T>
struct PoolRows {
  const T* pool;
  int64_t slot_stride;
  const int32_t* slots;
  int64_t count, head_dim;

  const T* row(int64_t i) const { return pool + slots[i] * slot_stride; }

  // Rows are scattered, which hardware prefetchers do not foresee.
  // Always inlined: GCC takes a function of prefetches alone for one without effect and drops it.
  [[gnu::always_inline]] void prefetch(int64_t i) const {
    if (i >= count) return;
    const char* bytes = reinterpret_cast<const char*>(row(i));
    for (int64_t b = 0; b < head_dim * static_cast<int64_t>(sizeof(T)); b += 64) {
      __builtin_prefetch(bytes + b);
    }
  }
};

// Transposes words of kLanes rows: out[d * kKeyBlock + lane], up to `width` dims.
template <typename T>
inline void store_transposed(BitsVec (&words)[kLanes], int64_t width, float* out) {
  transpose(words);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (sizeof(T) == 4) {
      if (i < width) store(out + i * kKeyBlock, bit_cast<Vec>(words[i]));
    } else {
      if (2 * i < width) store(out + 2 * i * kKeyBlock, even_element<T>(words[i]));
      if (2 * i + 1 < width) store(out + (2 * i + 1) * kKeyBlock, odd_element<T>(words[i]));
    }
  }
}

// Rows [first, first + kKeyBlock) as float32, transposed: keys[d * kKeyBlock + i]. Where there are
// fewer, some other numbers, for scores that nobody reads.
template <typename T>
inline void load_keys(const PoolRows<T>& rows, int64_t first, float* keys) {
  constexpr int64_t kStep = kLanes * (4 / sizeof(T));
  const int64_t head_dim = rows.head_dim;
  for (int64_t group = 0; group < kKeyBlock && first + group < rows.count; group += kLanes) {
    const T* row[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t index = first + group + i;
      row[i] = rows.row(index < rows.count ? index : rows.count - 1);
      rows.prefetch(index + kPrefetchRows);
    }
    BitsVec words[kLanes];
    int64_t d = 0;
    for (; d + kStep <= head_dim; d += kStep) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) words[i] = load_raw<BitsVec>(row[i] + d);
      store_transposed<T>(words, kStep, keys + d * kKeyBlock + group);
    }
    if (d < head_dim) {
      for (int i = 0; i < kLanes; ++i) {
        words[i] = BitsVec{};
        std::memcpy(&words[i], row[i] + d, static_cast<size_t>(head_dim - d) * sizeof(T));
      }
      store_transposed<T>(words, head_dim - d, keys + d * kKeyBlock + group);
    }
  }
}

// Rows [first, first + count) as float32: values[i * stride + d], untouched from head_dim on.
template <typename T>
inline void load_values(const PoolRows<T>& rows, int64_t first, int64_t count, float* values,
                        int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    const T* value = rows.row(first + i);
    rows.prefetch(first + i + kPrefetchRows);
    for_each_vector(rows.head_dim, [&](int64_t d, auto load_at, auto) {
      store(values + i * stride + d, load_at(value + d));
    });
  }
}

// scores[row][i] = scale * dot(q[row], key i), for Vecs vectors of keys.
template <int Rows, int Vecs>
inline void score_block(const float* q, int64_t q_stride, const float* keys, int64_t head_dim,
                        float scale, float* scores, int64_t score_stride) {
  Vec sums[Rows][Vecs] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec k[Vecs];
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) k[j] = load(keys + d * kKeyBlock + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      const Vec q_element = broadcast(q[i * q_stride + d]);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) sums[i][j] = fma(q_element, k[j], sums[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) {
      store(scores + i * score_stride + j * kLanes, sums[i][j] * scale);
    }
  }
}

// out[row] += sum over keys, in order, of probs[row][key] * value(key), for Vecs vectors of dims.
template <int Rows, int Vecs, typename Value>
inline void value_block(const float* probs, int64_t prob_stride, const Value& value, int64_t count,
                        float* out, int64_t stride) {
  Vec sums[Rows][Vecs];
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) sums[i][j] = load(out + i * stride + j * kLanes);
  }
  for (int64_t key = 0; key < count; ++key) {
    const auto* row = value(key);
    Vec v[Vecs];
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) v[j] = load(row + j * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < Rows; ++i) {
      const Vec prob = broadcast(probs[i * prob_stride + key]);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) sums[i][j] = fma(prob, v[j], sums[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < Vecs; ++j) store(out + i * stride + j * kLanes, sums[i][j]);
  }
}

// Calls f(first, std::integral_constant height) for register blocks that cover `rows` rows.
template <int Rows = kBlockRows, typename Function>
inline void for_each_row_block(int64_t rows, const Function& f, int64_t first = 0) {
  for (; first + Rows <= rows; first += Rows) f(first, std::integral_constant<int, Rows>{});
  if constexpr (Rows > 1) {
    if (first < rows) for_each_row_block<Rows - 1>(rows, f, first);
  }
}

// Scores of the first `count` keys of a block, rounded up to whole vectors.
inline void score_rows(const float* q, int64_t q_stride, int64_t row_heads, const float* keys,
                       int64_t count, int64_t head_dim, float scale, float* scores,
                       int64_t score_stride) {
  for_each_row_block(row_heads, [&](int64_t m, auto height) {
    const float* q_block = q + m * q_stride;
    float* to = scores + m * score_stride;
    if (count > kKeyBlock - kLanes) {
      score_block<height(), kBlockVecs>(q_block, q_stride, keys, head_dim, scale, to, score_stride);
      return;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      score_block<height(), 1>(q_block, q_stride, keys + i, head_dim, scale, to + i, score_stride);
    }
  });
}

template <typename Value>  // value(key) points to `stride` dims
inline void value_rows(const float* probs, int64_t prob_stride, int64_t row_heads,
                       const Value& value, int64_t count, float* out, int64_t stride) {
  for_each_row_block(row_heads, [&](int64_t m, auto height) {
    const float* p = probs + m * prob_stride;
    float* o = out + m * stride;
    int64_t d = 0;
    const auto value_from_d = [&](int64_t key) { return value(key) + d; };
    for (; d + kBlockVecs * kLanes <= stride; d += kBlockVecs * kLanes) {
      value_block<height(), kBlockVecs>(p, prob_stride, value_from_d, count, o + d, stride);
    }
    for (; d < stride; d += kLanes) {
      value_block<height(), 1>(p, prob_stride, value_from_d, count, o + d, stride);
    }
  });
}

// score = cap * tanh(score / cap), up to the next multiple of kLanes after `len`.
inline void cap_scores(float* scores, int64_t len, float cap) {
  for (int64_t i = 0; i < len; i += kLanes) store(scores + i, cap * tanh(load(scores + i) / cap));
}

// Replaces scores by exp(score - max) and returns the reciprocal of their sum, to both of which
// `sink` adds a score, or none if it is -inf. Clobbers the scores from `len` to the next multiple
// of kKeyBlock.
inline float exponentiate(float* scores, int64_t len, float sink) {
  const int64_t padded = round_up(len, kKeyBlock);
  for (int64_t i = len; i < padded; ++i) scores[i] = -__builtin_inff();
  Vec largest[kBlockVecs], sums[kBlockVecs] = {};
  for (int j = 0; j < kBlockVecs; ++j) largest[j] = broadcast(-__builtin_inff());
  for (int64_t i = 0; i < padded; i += kKeyBlock) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlockVecs; ++j) {
      largest[j] = max(largest[j], load(scores + i + j * kLanes));
    }
  }
  for (int j = 1; j < kBlockVecs; ++j) largest[0] = max(largest[0], largest[j]);
  const Vec maximum = max(broadcast(reduce_max(largest[0])), broadcast(sink));
  for (int64_t i = 0; i < padded; i += kKeyBlock) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlockVecs; ++j) {
      const Vec e = exp(load(scores + i + j * kLanes) - maximum);
      store(scores + i + j * kLanes, e);
      sums[j] += e;
    }
  }
  for (int j = 1; j < kBlockVecs; ++j) sums[0] += sums[j];
  const Vec of_sink = exp(broadcast(sink) - maximum);
  return 1.0f / (reduce_add(sums[0]) + of_sink[0]);
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
