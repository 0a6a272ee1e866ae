// The product of any number of rows with a packed weight, by AMX's tiles.
//
// An instruction multiplies up to 16 rows by 32 inputs of 16 outputs. Every output is a chain over
// tiles of 32 inputs, in order; within a tile the even and the odd inputs are two chains of fused
// multiply-adds, whose sum joins the total. So a row's bits depend on that row alone.
//
// A block of 32 rows keeps its sums with a panel's 32 outputs in registers while the inputs pass
// by. The next panel is fetched into the cache meanwhile: memory would idle otherwise.
#pragma once

#include "kernels.h"
#include "panel_matmul.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

#if defined(__AVX512F__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define ROLLOUT_TILES __attribute__((target("avx512bf16,amx-tile,amx-bf16")))

constexpr int64_t kTileRows = 16, kTileInputs = 32, kTileOutputs = 16;
constexpr int64_t kTileBlockRows = 2 * kTileRows;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kPairBytes = 2 * sizeof(uint16_t) * kTilePanelLanes;  // of a panel's two inputs
constexpr int64_t kStepBytes = kTileInputs / 2 * kPairBytes;            // of its tiles' inputs
constexpr int64_t kStepLines = kStepBytes / kLineBytes;

// Shapes of the eight tile registers, as the instruction reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Sums 0 and 1: the first 16 rows by both tiles of outputs; 2 and 3: the other rows. The rows
  // themselves: 4 and 5. The weight: 6 and 7.
  explicit TileShapes(int64_t block_rows) {
    const auto first = static_cast<uint8_t>(block_rows < kTileRows ? block_rows : kTileRows);
    const auto second = static_cast<uint8_t>(block_rows > kTileRows ? block_rows - kTileRows : 1);
    const uint8_t heights[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = heights[tile];
      row_bytes[tile] = kLineBytes;
    }
  }
};

// The compiler does not know that tile loads read memory.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

struct TileBlock {
  const uint16_t* x;  // of the first row
  int64_t x_row_bytes;
  const char* weight;    // a panel
  int64_t steps;         // of 32 inputs
  const uint16_t* rest;  // inputs that fill no tile, then zeros; null where all fill one
  float* sums;           // [rows][kTilePanelLanes]
  const char* ahead;     // to be fetched meanwhile
  int64_t ahead_lines;   // of it in each step
};

// Sums up to 16 rows, or where `kTall` up to 32.
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
    _tile_loadd(6, weight, kPairBytes);
    _tile_loadd(7, weight + kLineBytes, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTall) {
      _tile_loadd(5, reinterpret_cast<const char*>(x) + kTileRows * row_bytes, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += kStepBytes;
    for (int64_t line = 0; line < block.ahead_lines; ++line, ahead += kLineBytes) {
      _mm_prefetch(ahead, _MM_HINT_T1);
    }
  };
  for (int64_t step = 0; step < block.steps; ++step) {
    add(block.x + step * kTileInputs, block.x_row_bytes);
  }
  if (block.rest != nullptr) add(block.rest, kTileInputs * sizeof(uint16_t));
  constexpr int64_t kSumBytes = kTilePanelLanes * sizeof(float);
  _tile_stored(0, block.sums, kSumBytes);
  _tile_stored(1, block.sums + kTileOutputs, kSumBytes);
  if constexpr (kTall) {
    float* const second = block.sums + kTileRows * kTilePanelLanes;
    _tile_stored(2, second, kSumBytes);
    _tile_stored(3, second + kTileOutputs, kSumBytes);
  }
}

struct TileProduct {
  const PanelMatmulArgs& args;
  int64_t configured = 0;  // rows that the registers have shapes for

  const char* panel(int64_t index) const {
    return reinterpret_cast<const char*>(static_cast<const uint16_t*>(args.panels) +
                                         index * args.panel_stride);
  }

  // Rows [row, row + rows), at most kTileBlockRows, by a panel's outputs.
  ROLLOUT_TILES void multiply(int64_t index, int64_t row, int64_t rows, const char* ahead,
                              int64_t ahead_lines) {
    if (configured != rows) {
      const TileShapes shapes(rows);
      finish_stores();
      _tile_loadconfig(&shapes);
      configured = rows;
    }
    alignas(64) float sums[kTileBlockRows * kTilePanelLanes];
    alignas(64) uint16_t rest[kTileBlockRows * kTileInputs];
    const auto* x = static_cast<const uint16_t*>(args.x) + row * args.x_row_stride;
    const int64_t steps = args.inputs / kTileInputs, left = args.inputs % kTileInputs;
    if (left != 0) {
      const auto mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
      for (int64_t r = 0; r < rows; ++r) {
        const auto* from = x + r * args.x_row_stride + steps * kTileInputs;
        _mm512_store_si512(rest + r * kTileInputs, _mm512_maskz_loadu_epi16(mask, from));
      }
      finish_stores();
    }
    const TileBlock block{.x = x,
                          .x_row_bytes = args.x_row_stride * int64_t{sizeof(uint16_t)},
                          .weight = panel(index),
                          .steps = steps,
                          .rest = left == 0 ? nullptr : rest,
                          .sums = sums,
                          .ahead = ahead,
                          .ahead_lines = ahead_lines};
    rows > kTileRows ? sum_tiles<true>(block) : sum_tiles<false>(block);
    const int64_t first = index * kTilePanelLanes, outputs = args.outputs - first;
    const auto* bias = static_cast<const BFloat16*>(args.bias);
    for (int64_t r = 0; r < rows; ++r) {
      store_outputs(sums + r * kTilePanelLanes, bias == nullptr ? nullptr : bias + first,
                    outputs < kTilePanelLanes ? outputs : kTilePanelLanes,
                    static_cast<BFloat16*>(args.out) + (row + r) * args.outputs + first);
    }
  }
};

ROLLOUT_TILES inline void tile_matmul(const PanelMatmulArgs& args, int64_t begin, int64_t end) {
  TileProduct product{args};
  // Each block of rows fetches its part of the next panel.
  const int64_t blocks = (args.rows + kTileBlockRows - 1) / kTileBlockRows;
  const int64_t lines = (kStepLines + blocks - 1) / blocks;
  const int64_t block_bytes = (args.inputs + kTileInputs - 1) / kTileInputs * lines * kLineBytes;
  for (int64_t index = begin; index < end; ++index) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * kTileBlockRows, left = args.rows - row;
      product.multiply(index, row, left < kTileBlockRows ? left : kTileBlockRows,
                       product.panel(index + 1) + block * block_bytes, index + 1 < end ? lines : 0);
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
