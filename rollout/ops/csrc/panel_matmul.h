// The product of a few rows with a packed weight, by AVX-512's products of bfloat16 pairs.
//
// At few rows a product takes as long as its weight takes to be read. Up to six rows are therefore
// summed together while a panel passes by once; of more, the others find it in the cache, and
// memory would idle meanwhile if they did not fetch the next block.
//
// Every output is a chain of fused pairs of multiply-adds over a block of inputs, in order; the
// sums of the blocks are added in order. So a row's bits depend on that row alone, and with the
// block that a library uses they are the library's.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

#if defined(__AVX512F__)
// The instruction set's other kernels do without this extension, which `has_panel_matmul` asks for.
#define ROLLOUT_BF16 __attribute__((target("avx512bf16")))

constexpr int kPanelVectors = kPanelLanes / kLanes;
constexpr int kRowsTogether = 6;  // the sums and a unit of the panel fill the registers

struct PanelBlock {
  const uint16_t* units;  // of the panel: [count][kPanelLanes] pairs
  const uint16_t* x;      // of the first row, at the block's first input
  int64_t x_row_stride, count;
  float* sums;  // [rows][kPanelLanes]
  bool first;   // nothing was summed before
  // To be fetched into the cache meanwhile, two lines a unit; or null.
  const uint16_t* ahead;
};

template <int kRows>
ROLLOUT_BF16 void sum_block(const PanelBlock& block) {
  __m512 sums[kRows][kPanelVectors];
  for (auto& row : sums) {
    for (auto& lanes : row) lanes = _mm512_setzero_ps();
  }
  const uint16_t* unit = block.units;
  for (int64_t u = 0; u < block.count; ++u, unit += 2 * kPanelLanes) {
    if (block.ahead != nullptr) {
      const auto* line = reinterpret_cast<const char*>(block.ahead + u * kPanelLanes);
      _mm_prefetch(line, _MM_HINT_T1);
      _mm_prefetch(line + 64, _MM_HINT_T1);
    }
    __m512bh weights[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) {
      weights[v] = bit_cast<__m512bh>(_mm512_loadu_si512(unit + 2 * kLanes * v));
    }
    for (int row = 0; row < kRows; ++row) {
      const auto pair = load_raw<int32_t>(block.x + row * block.x_row_stride + 2 * u);
      const auto inputs = bit_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < kPanelVectors; ++v) {
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], inputs, weights[v]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kPanelVectors; ++v) {
      float* const total = block.sums + row * kPanelLanes + v * kLanes;
      if (!block.first) sums[row][v] = _mm512_add_ps(_mm512_loadu_ps(total), sums[row][v]);
      _mm512_storeu_ps(total, sums[row][v]);
    }
  }
}

constexpr void (*kSumBlock[])(const PanelBlock&) = {
    nullptr, sum_block<1>, sum_block<2>, sum_block<3>, sum_block<4>, sum_block<5>, sum_block<6>};

// Rounds the sums of a row, its bias added, to the first `count` of the panel's lanes.
ROLLOUT_BF16 inline void store_outputs(const float* sums, const BFloat16* bias, int64_t count,
                                       BFloat16* out) {
  for (int64_t lane = 0; lane < count; lane += kLanes) {
    const int64_t left = count - lane;
    const auto mask = static_cast<__mmask16>(left < kLanes ? (1u << left) - 1 : 0xffff);
    Vec total = load(sums + lane);
    if (bias != nullptr) {
      total += left < kLanes ? load_partial(bias + lane, left) : load(bias + lane);
    }
    const auto rounded = bit_cast<__m256i>(_mm512_cvtneps_pbh(total));
    _mm256_mask_storeu_epi16(out + lane, mask, rounded);
  }
}

struct PanelProduct {
  const PanelMatmulArgs& args;
  float* sums;  // [rows][kPanelLanes]

  const uint16_t* unit(int64_t panel, int64_t input) const {
    return static_cast<const uint16_t*>(args.panels) + panel * args.panel_stride +
           input * kPanelLanes;
  }

  // Adds up the block of inputs that begins at `input`. What follows it begins at `next`, or null.
  ROLLOUT_BF16 void add_block(int64_t panel, int64_t input, const uint16_t* next) const {
    const int64_t left = args.inputs - input;
    const int64_t count = (left < args.block ? left : args.block) / 2;
    const int64_t groups = (args.rows + kRowsTogether - 1) / kRowsTogether;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t begin = group * args.rows / groups, end = (group + 1) * args.rows / groups;
      // The first two groups fetch a half of it each; one alone waits for memory anyway.
      const bool fetches = groups > 1 && group < 2 && next != nullptr;
      kSumBlock[end - begin](
          {.units = unit(panel, input),
           .x = static_cast<const uint16_t*>(args.x) + begin * args.x_row_stride + input,
           .x_row_stride = args.x_row_stride,
           .count = count,
           .sums = sums + begin * kPanelLanes,
           .first = input == 0,
           .ahead = fetches ? next + group * count * kPanelLanes : nullptr});
    }
  }

  ROLLOUT_BF16 void store(int64_t panel) const {
    const int64_t first = panel * kPanelLanes, left = args.outputs - first;
    const auto* bias = static_cast<const BFloat16*>(args.bias);
    for (int64_t row = 0; row < args.rows; ++row) {
      store_outputs(sums + row * kPanelLanes, bias == nullptr ? nullptr : bias + first,
                    left < kPanelLanes ? left : kPanelLanes,
                    static_cast<BFloat16*>(args.out) + row * args.outputs + first);
    }
  }
};

ROLLOUT_BF16 inline void panel_matmul(const PanelMatmulArgs& args, int64_t begin, int64_t end,
                                      float* sums) {
  const PanelProduct product{args, sums};
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t input = 0; input < args.inputs; input += args.block) {
      const int64_t following = input + args.block;
      const uint16_t* next = panel + 1 < end ? product.unit(panel + 1, 0) : nullptr;
      if (following < args.inputs) next = product.unit(panel, following);
      product.add_block(panel, input, next);
    }
    product.store(panel);
  }
}

constexpr auto kPanelMatmul = panel_matmul;
#else
constexpr void (*kPanelMatmul)(const PanelMatmulArgs&, int64_t, int64_t, float*) = nullptr;
#endif

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
