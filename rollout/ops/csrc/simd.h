// Vectors of one instruction set: loads that widen to float32, stores that round once, exp.
//
// Included by kernels.cpp only. Everything is in an unnamed namespace, so that no function compiled
// for one instruction set can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace rollout::ROLLOUT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitsVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V, typename T>
inline V load_raw(const T* pointer) {
  V v;
  std::memcpy(&v, pointer, sizeof(v));
  return v;
}

inline Vec broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

// a * b + c, fused where the instruction set has it, never fused elsewhere (-ffp-contract=off).
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Per lane the larger; NaN may be lost.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float half_to_float(uint16_t half) {
  // Shift the fields into place, then let a multiplication by 2^112 rebias the exponent; it also
  // normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  uint32_t bits = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;  // infinities and NaN keep all exponent bits
  return bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

inline uint16_t float_to_half(float x) {
  uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00;
  } else if (bits >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (bits < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the result's last bit with the float's, rounding to even.
    half = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0xfff + ((bits >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>(half | sign >> 16);
}

// By intrinsics where there are any: GCC 12 splits these conversions in halves.
inline BitsVec zero_extend(ShortVec v) {
#if defined(__AVX512F__)
  return bit_cast<BitsVec>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return bit_cast<BitsVec>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, BitsVec);
#endif
}

inline ShortVec low_halves(BitsVec v) {
#if defined(__AVX512F__)
  return bit_cast<ShortVec>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(v)));
#else
  return __builtin_convertvector(v, ShortVec);
#endif
}

template <typename T>
inline Vec widen(ShortVec bits);

template <>
inline Vec widen<BFloat16>(ShortVec bits) {
  return bit_cast<Vec>(zero_extend(bits) << 16);
}

template <>
inline Vec widen<Half>(ShortVec bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(bits));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(bit_cast<__m128i>(bits));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = half_to_float(bits[i]);
  return v;
#endif
}

inline Vec load(const float* pointer) { return load_raw<Vec>(pointer); }

template <typename T>
inline Vec load(const T* pointer) {
  return widen<T>(load_raw<ShortVec>(pointer));
}

inline void store(float* pointer, Vec v) { std::memcpy(pointer, &v, sizeof(v)); }

// v rounded to T, to nearest even.
template <typename T>
inline ShortVec narrow(Vec v);

template <>
inline ShortVec narrow<BFloat16>(Vec v) {
  const BitsVec bits = bit_cast<BitsVec>(v);
  const BitsVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return low_halves(v != v ? BitsVec{} + 0x7fc0 : rounded);
}

template <>
inline ShortVec narrow<Half>(Vec v) {
#if defined(__AVX512F__)
  return bit_cast<ShortVec>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  return bit_cast<ShortVec>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  ShortVec bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = float_to_half(v[i]);
  return bits;
#endif
}

template <typename T>
inline void store(T* pointer, Vec v) {
  const ShortVec bits = narrow<T>(v);
  std::memcpy(pointer, &bits, sizeof(bits));
}

// v rounded to T and back.
template <typename T>
inline Vec round_to(Vec v) {
  return widen<T>(narrow<T>(v));
}
template <>
inline Vec round_to<float>(Vec v) {
  return v;
}

// The first `count` lanes from memory, the others zero.
template <typename T>
inline Vec load_partial(const T* pointer, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, pointer, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_partial(T* pointer, Vec v, int64_t count) {
  T padded[kLanes];
  store(padded, v);
  std::memcpy(pointer, padded, static_cast<size_t>(count) * sizeof(T));
}

// Calls f(offset, load, store) for each vector of a row of `width` elements, where load(pointer)
// and store(pointer, v) are partial in the last vector.
template <typename Function>
inline void for_each_vector(int64_t width, const Function& f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    f(i, [](const auto* p) { return load(p); }, [](auto* p, Vec v) { store(p, v); });
  }
  if (i < width) {
    const int64_t count = width - i;
    f(
        i, [count](const auto* p) { return load_partial(p, count); },
        [count](auto* p, Vec v) { store_partial(p, v, count); });
  }
}

template <int Distance, size_t... Lane>
inline Vec swap_lanes(Vec v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ Distance)...);
}

// Folds the lanes in halves: lane i with lane i + kLanes / 2, and so on.
template <int Distance = kLanes / 2, typename Combine>
inline float fold(Vec v, const Combine& combine) {
  v = combine(v, swap_lanes<Distance>(v, std::make_index_sequence<kLanes>{}));
  if constexpr (Distance > 1) return fold<Distance / 2>(v, combine);
  return v[0];
}

inline float reduce_add(Vec v) {
  return fold(v, [](Vec a, Vec b) { return a + b; });
}

inline float reduce_max(Vec v) {
  return fold(v, [](Vec a, Vec b) { return max(a, b); });
}

// exp(x), relative error below 1e-7 for x in [-87.33, 88.37]; exactly 0 below, +inf above, NaN for
// NaN. x = n ln 2 + r with |r| <= ln 2 / 2, e^r by a polynomial fitted for relative error.
inline Vec exp(Vec x) {
  const Vec magic = broadcast(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const Vec bounded = x > 89.0f ? broadcast(89.0f) : x;
  const Vec shifted = fma(bounded, broadcast(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, broadcast(-0.693145752f), bounded);  // ln 2 in two parts, the first exact times n
  r = fma(n, broadcast(-1.42860677e-6f), r);
  Vec p = broadcast(0x1.6a2256p-10f);
  p = fma(p, r, broadcast(0x1.123b02p-7f));
  p = fma(p, r, broadcast(0x1.5558f8p-5f));
  p = fma(p, r, broadcast(0x1.555490p-3f));
  p = fma(p, r, broadcast(0x1.fffffcp-2f));
  p = fma(r * r, p, r) + 1.0f;
  const Vec scale = bit_cast<Vec>((bit_cast<BitsVec>(shifted) - 0x4b400000u + 127) << 23);
  return x < -87.33f ? Vec{} : p * scale;
}

inline Vec sigmoid(Vec x) { return 1.0f / (exp(-x) + 1.0f); }

inline Vec silu(Vec x) { return x / (exp(-x) + 1.0f); }

// tanh(x), relative error below 2e-7: near zero an odd polynomial (Cephes), elsewhere by exp.
inline Vec tanh(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x, square = x * x;
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vec small = fma(p * square, x, x);
  const Vec large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
}

// x / 2 (1 + tanh(y)) is x sigmoid(2 y), which does not cancel.
inline Vec gelu_tanh(Vec x) {
  const Vec cubic = fma(x * x * x, broadcast(0.044715f), x);
  return x * sigmoid(1.59576912f * cubic);
}

// log(1 + exp(x)) = max(x, 0) + log1p(u) with u = exp(-|x|), and log1p(u) = 2 artanh(u / (2 + u)),
// an argument of at most 1/3: its series, cut where the next term is below 2e-8 of the sum.
inline Vec softplus(Vec x) {
  const Vec u = exp(x > 0.0f ? -x : x);
  const Vec s = u / (u + 2.0f), square = s * s;
  Vec sum = broadcast(1.0f / 13.0f);
  for (int divisor = 11; divisor > 0; divisor -= 2) {
    sum = fma(sum, square, broadcast(1.0f / static_cast<float>(divisor)));
  }
  return (x > 0.0f ? x : Vec{}) + 2.0f * s * sum;
}

// One step of Eklundh's matrix transposition: swaps the off-diagonal blocks of size `Block`.
template <int Block, size_t... Lane>
inline void swap_blocks(BitsVec& upper, BitsVec& lower, std::index_sequence<Lane...>) {
  const BitsVec a = upper, b = lower;
  upper = __builtin_shufflevector(a, b, (Lane & Block ? kLanes + (Lane ^ Block) : Lane)...);
  lower = __builtin_shufflevector(a, b, (Lane & Block ? kLanes + Lane : Lane | Block)...);
}

template <int Block = kLanes / 2>
inline void transpose(BitsVec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & Block)) {
      swap_blocks<Block>(rows[i], rows[i | Block], std::make_index_sequence<kLanes>{});
    }
  }
  if constexpr (Block > 1) transpose<Block / 2>(rows);
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
