#include "ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace rollout {
namespace {

// Below these, waking the team costs more than it saves.
constexpr int64_t kParallelElements = 32 * 1024;
constexpr int64_t kParallelMultiplyAdds = 128 * 1024;

void check_indices(const Indices& indices, int64_t count, int64_t limit, const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    if (index < 0 || index >= limit) {
      throw std::out_of_range(std::string(name) + "[" + std::to_string(i) +
                              "]=" + std::to_string(index) + ": must be in [0, " +
                              std::to_string(limit) + ")");
    }
  }
}

// Calls f(begin, end) over chunks of rows, a few per thread.
template <typename Function>
void parallel_rows(int64_t rows, int64_t elements, int threads, const Function& f) {
  if (threads == 1 || elements < kParallelElements) return f(0, rows);
  const int64_t chunk = std::max<int64_t>(1, rows / (4 * threads));
  parallel_for((rows + chunk - 1) / chunk, threads, 0,
               [&](int64_t item, void*) { f(item * chunk, std::min(rows, (item + 1) * chunk)); });
}

void copy_heads(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride,
                int64_t heads, int64_t head_bytes) {
  if (from_stride == head_bytes && to_stride == head_bytes) {
    std::memcpy(to, from, heads * head_bytes);
    return;
  }
  for (int64_t head = 0; head < heads; ++head) {
    std::memcpy(to + head * to_stride, from + head * from_stride, head_bytes);
  }
}

template <typename Function>
void parallel_vocab_rows(const CategoricalArgs& args, int64_t rows, int threads,
                         const Function& f) {
  if (args.vocab < 1) throw std::invalid_argument("logits must have at least one column");
  const size_t scratch_bytes = (args.vocab + kVocabBlock - 1) / kVocabBlock * sizeof(float);
  const bool small = rows * args.vocab < kParallelElements;
  parallel_for(rows, small ? 1 : threads, scratch_bytes,
               [&](int64_t row, void* scratch) { f(row, static_cast<float*>(scratch)); });
}

template <typename Kernel>
void parallel_panels(const PanelArgs& args, int threads, const Kernel& kernel) {
  if (args.num_rows == 0) return;
  const int64_t first = args.first_row / kPanelLanes;
  const int64_t last = (args.first_row + args.num_rows - 1) / kPanelLanes;
  const bool small = args.num_rows * args.inputs < kParallelElements;
  parallel_for(last - first + 1, small ? 1 : threads, 0,
               [&](int64_t item, void*) { kernel(args, first + item); });
}

}  // namespace

void rms_norm(const RmsNormArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.width, threads,
                [&](int64_t begin, int64_t end) { kernels().rms_norm(args, begin, end); });
}

void rotary(const RotaryArgs& args, int threads) {
  check_indices(args.positions, args.rows, args.max_positions, "positions_T");
  const int64_t elements = args.rows * (args.q_heads + args.k_heads) * args.half * 2;
  parallel_rows(args.rows, elements, threads,
                [&](int64_t begin, int64_t end) { kernels().rotary(args, begin, end); });
}

void store_kv(const StoreKvArgs& args, int threads) {
  check_indices(args.slots, args.rows, args.num_slots, "slots_T");
  const int64_t size = element_bytes(args.dtype);
  const int64_t head_bytes = args.head_dim * size;
  // Slots may repeat (padding rows share one), so rows are written in order, by one thread; the
  // keys and the values are two items.
  const auto store = [&](const void* from, int64_t row_stride, int64_t head_stride, void* pool,
                         int64_t slot_stride, int64_t pool_head_stride) {
    for (int64_t row = 0; row < args.rows; ++row) {
      copy_heads(static_cast<const std::byte*>(from) + row * row_stride * size, head_stride * size,
                 static_cast<std::byte*>(pool) + args.slots[row] * slot_stride * size,
                 pool_head_stride * size, args.heads, head_bytes);
    }
  };
  const bool small = args.rows * args.heads * args.head_dim < kParallelElements;
  parallel_for(2, small ? 1 : threads, 0, [&](int64_t item, void*) {
    if (item == 0) {
      store(args.k, args.k_row_stride, args.k_head_stride, args.k_pool, args.k_slot_stride,
            args.k_pool_head_stride);
    } else {
      store(args.v, args.v_row_stride, args.v_head_stride, args.v_pool, args.v_slot_stride,
            args.v_pool_head_stride);
    }
  });
}

void silu_mul(const SiluMulArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.width, threads,
                [&](int64_t begin, int64_t end) { kernels().silu_mul(args, begin, end); });
}

void paged_attention(const AttentionArgs& args, const AttentionSchedule& schedule, int threads) {
  const int64_t row_bytes = args.kv_heads * args.group * args.head_dim * element_bytes(args.dtype);
  const int64_t padding_rows = schedule.sizes().query_rows - schedule.covered_rows();
  std::memset(static_cast<std::byte*>(args.out) + schedule.covered_rows() * row_bytes, 0,
              padding_rows * row_bytes);

  const auto& tiles = schedule.tiles();
  const int64_t items = static_cast<int64_t>(tiles.size()) * args.kv_heads;
  const int64_t multiply_adds =
      2 * schedule.row_keys() * args.kv_heads * args.group * args.head_dim;
  const int64_t scratch_floats = attention_scratch_floats(schedule.max_tile_rows(), args.group,
                                                          args.head_dim, schedule.max_len());
  parallel_for(items, multiply_adds < kParallelMultiplyAdds ? 1 : threads,
               scratch_floats * sizeof(float), [&](int64_t item, void* scratch) {
                 kernels().attend(args, tiles[item / args.kv_heads], item % args.kv_heads,
                                  static_cast<float*>(scratch));
               });
}

void categorical(const CategoricalArgs& args, int64_t rows, int threads) {
  parallel_vocab_rows(args, rows, threads, [&](int64_t row, float* block_sums) {
    kernels().categorical(args, row, block_sums);
  });
}

void token_logprobs(const CategoricalArgs& args, int64_t rows, int threads) {
  check_indices({args.given_tokens, true}, rows, args.vocab, "tokens_R");
  parallel_vocab_rows(args, rows, threads,
                      [&](int64_t row, float*) { kernels().token_logprob(args, row); });
}

void entropy(const CategoricalArgs& args, int64_t rows, int threads) {
  parallel_vocab_rows(args, rows, threads,
                      [&](int64_t row, float*) { kernels().entropy(args, row); });
}

void write_panels(const PanelArgs& args, int threads) {
  parallel_panels(args, threads, kernels().write_panel);
}

void read_panels(const PanelArgs& args, int threads) {
  parallel_panels(args, threads, kernels().read_panel);
}

}  // namespace rollout
