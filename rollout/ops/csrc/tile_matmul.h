// The product of any number of rows with a packed weight, by AMX's tiles.
//
// An instruction multiplies up to 16 rows by 32 inputs of 16 outputs. Every output is a chain over
// tiles of 32 inputs, in order; within a tile the even and the odd inputs are two chains of fused
// multiply-adds, whose sum joins the total. So a row's bits depend on that row alone.
//
// A block of 32 rows and 32 outputs keeps its four sums in registers while the inputs pass by. Up
// to 16 rows take as long as the weight takes to be read, for which half of the registers do.
#pragma once

#include "kernels.h"
#include "panel_matmul.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

#if defined(__AVX512F__) && defined(__linux__)
#define ROLLOUT_TILES __attribute__((target("avx512bf16,amx-tile,amx-bf16")))

constexpr int kTileRows = 16, kTileInputs = 32, kTileOutputs = 16;
constexpr int kTileBlockRows = 2 * kTileRows, kTileBlockOutputs = 2 * kTileOutputs;
constexpr int64_t kPairBytes = 2 * sizeof(uint16_t);  // of two inputs of an output
constexpr int64_t kPanelRowBytes = kPairBytes * kPanelLanes;

// Shapes of the eight tile registers, as the instruction reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Sums 0 to 3: rows 0 to 15 by two tiles of outputs, then the others. Rows of x: 4 and 5.
  // The weight: 6 and 7.
  explicit TileShapes(int64_t block_rows) {
    const auto first = static_cast<uint8_t>(block_rows < kTileRows ? block_rows : kTileRows);
    // A register that is not used must have a shape too, or its neighbours' code faults.
    const auto second = static_cast<uint8_t>(block_rows > kTileRows ? block_rows - kTileRows : 1);
    const uint8_t heights[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      row_bytes[tile] = 64;
    }
  }
};

// What the compiler knows nothing of was written: the next tile loads must see it.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

struct TileBlock {
  const uint16_t* x;  // of the first row
  int64_t x_row_bytes;
  const char* weight;  // the panel's units, from the first of 32 outputs on
  int64_t tiles;       // of 32 inputs
  // Inputs that fill no tile, followed by zeros; null where all fill one.
  const uint16_t* rest;
  float* sums;  // [32][kPanelLanes], from the first output on
  // As much of the weight as this reads, to be fetched into the cache meanwhile; or null.
  const char* ahead;
};

constexpr int64_t kTileBytes = kTileInputs / 2 * kPanelRowBytes;  // of a panel

// Two chains of 16 rows by two tiles of outputs; `kTall`: of 17 to 32 rows.
template <bool kTall>
ROLLOUT_TILES void sum_tiles(const TileBlock& block) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTall) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const char *weight = block.weight, *ahead = block.ahead;
  const auto add = [&](const uint16_t* x, int64_t row_bytes) ROLLOUT_TILES {
    _tile_loadd(4, x, row_bytes);
    _tile_loadd(6, weight, kPanelRowBytes);
    _tile_loadd(7, weight + 4 * kTileOutputs, kPanelRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTall) {
      _tile_loadd(5, reinterpret_cast<const char*>(x) + kTileRows * row_bytes, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += kTileBytes;
    if (ahead == nullptr) return;
    for (int64_t pair = 0; pair < kTileInputs / 2; ++pair) {
      _mm_prefetch(ahead + pair * kPanelRowBytes, _MM_HINT_T1);
      _mm_prefetch(ahead + pair * kPanelRowBytes + 64, _MM_HINT_T1);
    }
    ahead += kTileBytes;
  };
  for (int64_t tile = 0; tile < block.tiles; ++tile) {
    add(block.x + tile * kTileInputs, block.x_row_bytes);
  }
  if (block.rest != nullptr) add(block.rest, kTileInputs * sizeof(uint16_t));
  constexpr int64_t kSumBytes = kPanelLanes * sizeof(float);
  _tile_stored(0, block.sums, kSumBytes);
  _tile_stored(1, block.sums + kTileOutputs, kSumBytes);
  if constexpr (kTall) {
    float* const second = block.sums + kTileRows * kPanelLanes;
    _tile_stored(2, second, kSumBytes);
    _tile_stored(3, second + kTileOutputs, kSumBytes);
  }
}

struct TileProduct {
  const PanelMatmulArgs& args;
  int64_t configured = 0;  // the rows that the registers have shapes for

  const char* units(int64_t panel) const {
    return reinterpret_cast<const char*>(static_cast<const uint16_t*>(args.panels) +
                                         panel * args.panel_stride);
  }

  // Rows [row, row + rows), at most kTileBlockRows, by a panel's outputs. `next`: the weight that
  // is read afterwards, or null where that is this panel.
  ROLLOUT_TILES void multiply(int64_t panel, int64_t row, int64_t rows, const char* next) {
    if (configured != rows) {
      const TileShapes shapes(rows);
      finish_stores();
      _tile_loadconfig(&shapes);
      configured = rows;
    }
    alignas(64) float sums[kTileBlockRows * kPanelLanes];
    alignas(64) uint16_t rest[kTileBlockRows * kTileInputs];
    const auto* x = static_cast<const uint16_t*>(args.x) + row * args.x_row_stride;
    const int64_t tiles = args.inputs / kTileInputs, left = args.inputs % kTileInputs;
    if (left != 0) {
      for (int64_t r = 0; r < rows; ++r) {
        const auto mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
        const auto* from = x + r * args.x_row_stride + tiles * kTileInputs;
        _mm512_store_si512(rest + r * kTileInputs, _mm512_maskz_loadu_epi16(mask, from));
      }
      finish_stores();
    }
    const int64_t first = panel * kPanelLanes;
    const int64_t outputs = args.outputs - first < kPanelLanes ? args.outputs - first : kPanelLanes;
    for (int64_t lane = 0; lane < outputs; lane += kTileBlockOutputs) {
      const char* weight = units(panel) + lane * kPairBytes;
      const bool is_last = lane + kTileBlockOutputs >= outputs;
      const TileBlock block{.x = x,
                            .x_row_bytes = args.x_row_stride * int64_t{sizeof(uint16_t)},
                            .weight = weight,
                            .tiles = tiles,
                            .rest = left == 0 ? nullptr : rest,
                            .sums = sums + lane,
                            .ahead = is_last ? next : weight + kTileBlockOutputs * kPairBytes};
      rows > kTileRows ? sum_tiles<true>(block) : sum_tiles<false>(block);
    }
    const auto* bias = static_cast<const BFloat16*>(args.bias);
    for (int64_t r = 0; r < rows; ++r) {
      store_outputs(sums + r * kPanelLanes, bias == nullptr ? nullptr : bias + first, outputs,
                    static_cast<BFloat16*>(args.out) + (row + r) * args.outputs + first);
    }
  }
};

ROLLOUT_TILES inline void tile_matmul(const PanelMatmulArgs& args, int64_t begin, int64_t end) {
  TileProduct product{args};
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t row = 0; row < args.rows; row += kTileBlockRows) {
      const int64_t left = args.rows - row;
      const bool is_last = left <= kTileBlockRows;
      product.multiply(panel, row, is_last ? left : kTileBlockRows,
                       is_last && panel + 1 < end ? product.units(panel + 1) : nullptr);
    }
  }
  _tile_release();
}

constexpr auto kTileMatmul = tile_matmul;
#undef ROLLOUT_TILES
#else
constexpr void (*kTileMatmul)(const PanelMatmulArgs&, int64_t, int64_t) = nullptr;
#endif

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
