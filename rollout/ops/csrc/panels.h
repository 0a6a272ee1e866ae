#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

constexpr int64_t kBlock = 16;  // rows and units moved together: a cache line of each

#if defined(__AVX512F__)
// Past the caches where whole lines are written: what is written is not read again soon, and a line
// that is stored normally is read first.
inline void store_line(uint32_t* to, __m512i line, bool stream) {
  if (stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}

// to[j] = the j-th words of all rows. Words move as they are: they may be halves of two numbers.
inline void transpose_block(const uint32_t* from, int64_t from_stride, uint32_t* to,
                            int64_t to_stride, bool stream) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = _mm512_loadu_si512(from + i * from_stride);
    // Prefetch the same rows of the next panel: rows are too short for the hardware prefetcher.
    // Prefetching an address beyond the tensor does not fault.
    _mm_prefetch(reinterpret_cast<const char*>(from + (i + kPanelLanes) * from_stride),
                 _MM_HINT_T1);
  }
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  // a[4 g + j] holds, in its four quarters q, words 4 q + j of rows 4 g .. 4 g + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    store_line(to + j * to_stride, _mm512_shuffle_i32x4(low01, low23, 0x88), stream);
    store_line(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(low01, low23, 0xdd), stream);
    store_line(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0x88), stream);
    store_line(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(high01, high23, 0xdd), stream);
  }
}

inline void finish_streaming() { _mm_sfence(); }
#else
inline void transpose_block(const uint32_t* from, int64_t from_stride, uint32_t* to,
                            int64_t to_stride, bool) {
  for (int64_t j = 0; j < kBlock; ++j) {
    for (int64_t i = 0; i < kBlock; ++i) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

inline void finish_streaming() {}
#endif

// Moves one row's elements [begin, inputs) one by one.
template <typename T, bool kRead>
inline void move_row(const PanelArgs& args, T* row, T* lane, int64_t begin) {
  constexpr int64_t kElements = 4 / sizeof(T);
  for (int64_t i = begin; i < args.inputs; ++i) {
    T& packed = lane[i / kElements * args.lanes * kElements + i % kElements];
    if (kRead) {
      row[i] = packed;
    } else {
      packed = row[i];
    }
  }
}

template <typename T, bool kRead>
inline void move_panel(const PanelArgs& args, int64_t panel) {
  constexpr int64_t kElements = 4 / sizeof(T);  // of a unit, which is a word
  T* packed = static_cast<T*>(args.panels) + panel * args.panel_stride;
  T* rows = static_cast<T*>(args.rows);
  const int64_t begin = panel * args.lanes > args.first_row ? panel * args.lanes : args.first_row;
  const int64_t panel_end = (panel + 1) * args.lanes, last = args.first_row + args.num_rows;
  const int64_t end = panel_end < last ? panel_end : last;
  // Words are moved whole where rows begin at one.
  const bool words = args.row_stride % kElements == 0 &&
                     reinterpret_cast<uintptr_t>(args.rows) % sizeof(uint32_t) == 0;
  const int64_t block_units = words ? args.inputs / kElements / kBlock * kBlock : 0;
  // Whole lines of a panel's units one after the other, so that memory sees long runs.
  const int64_t blocks = (end - begin) / kBlock;
  uint32_t* from = reinterpret_cast<uint32_t*>(rows + (begin - args.first_row) * args.row_stride);
  uint32_t* to = reinterpret_cast<uint32_t*>(packed + begin % args.lanes * kElements);
  const int64_t stride = args.row_stride / kElements;
  const bool stream = reinterpret_cast<uintptr_t>(to) % (kBlock * sizeof(uint32_t)) == 0;
  for (int64_t unit = 0; unit < block_units; unit += kBlock) {
    for (int64_t block = 0; block < blocks; ++block) {
      uint32_t* plain = from + block * kBlock * stride + unit;
      uint32_t* lanes = to + block * kBlock + unit * args.lanes;
      if (kRead) {
        transpose_block(lanes, args.lanes, plain, stride, false);
      } else {
        transpose_block(plain, stride, lanes, args.lanes, stream);
      }
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    const bool in_block = row < begin + blocks * kBlock;
    move_row<T, kRead>(args, rows + (row - args.first_row) * args.row_stride,
                       packed + row % args.lanes * kElements,
                       in_block ? block_units * kElements : 0);
  }
  finish_streaming();
}

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
