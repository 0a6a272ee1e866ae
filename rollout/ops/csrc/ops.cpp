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

constexpr int64_t kPanelChunks = 4;  // of adjacent panels, for each thread

void check_indices(const Indices& indices, int64_t count, int64_t limit, const char* name,
                   int64_t lowest = 0) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    if (index < lowest || index >= limit) {
      throw std::out_of_range(std::string(name) + "[" + std::to_string(i) +
                              "]=" + std::to_string(index) + ": must be in [" +
                              std::to_string(lowest) + ", " + std::to_string(limit) + ")");
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

// Checks that every state a row continues exists: in a slot of the pool or from the row before.
void check_plan(const StatePlan& plan, int64_t rows, int64_t slots) {
  for (int64_t entry = 0; entry < plan.entries; ++entry) {
    const int64_t begin = plan.q_offsets[entry], end = plan.q_offsets[entry + 1];
    if (begin < 0 || begin > end || end > rows || (entry == 0 && begin != 0)) {
      throw std::invalid_argument("q_offsets_B1: must ascend from 0 to at most the rows");
    }
    for (int64_t row = begin; row < end; ++row) {
      const int64_t parent = plan.parents[row];
      if (parent != -1 && (parent < begin || parent >= row)) {
        throw std::invalid_argument("parents_T[" + std::to_string(row) +
                                    "]=" + std::to_string(parent) +
                                    ": must be -1 or an earlier row of its entry");
      }
      if (parent >= 0 && parent != row - 1 && plan.targets[parent] == kNoState) {
        throw std::invalid_argument("targets_T[" + std::to_string(parent) +
                                    "]=0: a row that is continued further on needs a target");
      }
    }
  }
  check_indices({plan.sources, false}, plan.entries, slots, "sources_B");
  check_indices({plan.targets, false}, rows, slots, "targets_T");
}

void zero_padding(void* out, int64_t first_row, int64_t rows, int64_t row_bytes) {
  std::memset(static_cast<std::byte*>(out) + first_row * row_bytes, 0,
              (rows - first_row) * row_bytes);
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

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// SplitMix64's finalizer (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

template <typename Kernel>
void parallel_panels(const PanelArgs& args, int threads, const Kernel& kernel) {
  if (args.num_rows == 0) return;
  const int64_t first = args.first_row / args.lanes;
  const int64_t last = (args.first_row + args.num_rows - 1) / args.lanes;
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
  parallel_for(args.v == nullptr ? 1 : 2, small ? 1 : threads, 0, [&](int64_t item, void*) {
    if (item == 0) {
      store(args.k, args.k_row_stride, args.k_head_stride, args.k_pool, args.k_slot_stride,
            args.k_pool_head_stride);
    } else {
      store(args.v, args.v_row_stride, args.v_head_stride, args.v_pool, args.v_slot_stride,
            args.v_pool_head_stride);
    }
  });
}

void gated_mul(const GatedMulArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.width, threads,
                [&](int64_t begin, int64_t end) { kernels().gated_mul(args, begin, end); });
}

void soft_cap(const SoftCapArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.width, threads,
                [&](int64_t begin, int64_t end) { kernels().soft_cap(args, begin, end); });
}

void sigmoid_gate(const SigmoidGateArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.width, threads,
                [&](int64_t begin, int64_t end) { kernels().sigmoid_gate(args, begin, end); });
}

void delta_gates(const DeltaGatesArgs& args, int threads) {
  parallel_rows(args.rows, args.rows * args.heads, threads,
                [&](int64_t begin, int64_t end) { kernels().delta_gates(args, begin, end); });
}

void causal_conv(const CausalConvArgs& args, int64_t slots, int threads) {
  check_plan(args.plan, args.rows, slots);
  zero_padding(args.out, args.plan.rows(), args.rows, args.channels * element_bytes(args.dtype));
  const bool small = args.rows * args.channels < kParallelElements;
  parallel_for((args.channels + kConvChannels - 1) / kConvChannels, small ? 1 : threads,
               conv_scratch_bytes(args.taps), [&](int64_t item, void* scratch) {
                 kernels().causal_conv(args, item * kConvChannels, scratch);
               });
}

void gated_delta_rule(const DeltaRuleArgs& args, int64_t slots, int threads) {
  check_plan(args.plan, args.rows, slots);
  zero_padding(args.out, args.plan.rows(), args.rows,
               args.heads * args.value_dim * element_bytes(args.dtype));
  const int64_t blocks = (args.value_dim + kStateColumns - 1) / kStateColumns;
  const int64_t multiply_adds = 3 * args.rows * args.heads * args.key_dim * args.value_dim;
  parallel_for(
      args.plan.entries * args.heads * blocks, multiply_adds < kParallelMultiplyAdds ? 1 : threads,
      delta_rule_scratch_floats(args.key_dim) * sizeof(float), [&](int64_t item, void* scratch) {
        kernels().delta_rule(args, item / blocks / args.heads, item / blocks % args.heads,
                             item % blocks * kStateColumns, static_cast<float*>(scratch));
      });
}

void paged_attention(const AttentionArgs& args, const AttentionSchedule& schedule, int threads) {
  const int64_t row_bytes = args.kv_heads * args.group * args.value_dim * element_bytes(args.dtype);
  zero_padding(args.out, schedule.covered_rows(), schedule.sizes().query_rows, row_bytes);

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

void head_matmul(const HeadMatmulArgs& args, int threads) {
  const int64_t blocks = (args.rows + kHeadRows - 1) / kHeadRows;
  const int64_t multiply_adds = args.rows * args.heads * args.inputs * args.outputs;
  const int64_t scratch_floats =
      head_matmul_scratch_floats(std::min(args.rows, kHeadRows), args.inputs, args.outputs);
  parallel_for(args.heads * blocks, multiply_adds < kParallelMultiplyAdds ? 1 : threads,
               scratch_floats * sizeof(float), [&](int64_t item, void* scratch) {
                 // Blocks of one head follow each other, while its weight is in the cache.
                 const int64_t begin = item % blocks * kHeadRows;
                 kernels().head_matmul(args, item / blocks, begin,
                                       std::min(args.rows, begin + kHeadRows),
                                       static_cast<float*>(scratch));
               });
}

void categorical(const CategoricalArgs& args, int64_t rows, int threads) {
  parallel_vocab_rows(args, rows, threads, [&](int64_t row, float* block_sums) {
    kernels().categorical(args, row, block_sums);
  });
}

void guesses(const GuessArgs& args, int64_t rows, int threads) {
  const bool small = rows * args.vocab < kParallelElements;
  parallel_for(rows, small ? 1 : threads, static_cast<size_t>(guess_scratch_bytes(args.vocab)),
               [&](int64_t row, void* scratch) { kernels().guesses(args, row, scratch); });
}

void token_logprobs(const CategoricalArgs& args, int64_t rows, int threads) {
  check_indices({args.given_tokens, true}, rows * args.tokens_per_row, args.vocab, "tokens_R", -1);
  parallel_vocab_rows(args, rows, threads, [&](int64_t row, float* block_sums) {
    kernels().token_logprobs(args, row, block_sums);
  });
}

void entropy(const CategoricalArgs& args, int64_t rows, int threads) {
  parallel_vocab_rows(args, rows, threads,
                      [&](int64_t row, float*) { kernels().entropy(args, row); });
}

void uniforms(const uint64_t* seeds, const uint64_t* positions, int64_t rows, double* out) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t key = mix(seeds[row] + kGolden);
    const uint64_t counter = mix((positions[row] + 1) * kGolden);
    out[row] = static_cast<double>(mix(mix(key ^ counter) + key) >> 11) * 0x1p-53;
  }
}

void write_panels(const PanelArgs& args, int threads) {
  parallel_panels(args, threads, kernels().write_panel);
}

void read_panels(const PanelArgs& args, int threads) {
  parallel_panels(args, threads, kernels().read_panel);
}

void panel_matmul(const PanelMatmulArgs& args, int threads) {
  if (args.rows == 0) return;
  const bool small = args.rows * args.inputs * args.outputs < kParallelMultiplyAdds;
  const int64_t panels = (args.outputs + kPanelLanes - 1) / kPanelLanes;
  const int64_t chunk = std::max<int64_t>(1, panels / (kPanelChunks * threads));
  parallel_for((panels + chunk - 1) / chunk, small ? 1 : threads,
               static_cast<size_t>(args.rows * kPanelLanes) * sizeof(float),
               [&](int64_t item, void* scratch) {
                 const int64_t begin = item * chunk, end = std::min(panels, begin + chunk);
                 kernels().panel_matmul(args, begin, end, static_cast<float*>(scratch));
               });
}

void tile_matmul(const PanelMatmulArgs& args, int threads) {
  if (args.rows == 0) return;
  const bool small = args.rows * args.inputs * args.outputs < kParallelMultiplyAdds;
  const int64_t panels = (args.outputs + kTilePanelLanes - 1) / kTilePanelLanes;
  const int64_t chunk = std::max<int64_t>(1, panels / (kPanelChunks * threads));
  parallel_for((panels + chunk - 1) / chunk, small ? 1 : threads, 0, [&](int64_t item, void*) {
    const int64_t begin = item * chunk, end = std::min(panels, begin + chunk);
    kernels().tile_matmul(args, begin, end);
  });
}

}  // namespace rollout
