// The arguments of the kernels, and the table of kernels that each instruction set fills.
//
// Pointers are to elements of `dtype` unless typed; strides count elements, and the elements of a
// row or of a head are adjacent. Row kernels take a half-open range of rows.
#pragma once

#include <cstdint>

namespace rollout {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

struct RmsNormArgs {
  DType dtype;
  const void* x;
  int64_t x_row_stride, x_head_stride;  // row r of the flat output is x[r / heads][r % heads]
  void* residual;                       // or null: x is normalised, not residual += x
  int64_t residual_row_stride;
  const void* weight;
  bool unit_offset;  // the weight is 1 + weight
  const void* gate;  // or null: the output is not multiplied by silu(gate)
  int64_t gate_row_stride, gate_head_stride;
  void* out;  // contiguous
  int64_t rows, heads, width;
  float eps;
};

// Token indices that come from torch are int32 or int64.
struct Indices {
  const void* data;
  bool wide;

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct RotaryArgs {
  DType dtype;
  void* q;
  void* k;
  int64_t q_row_stride, q_head_stride, k_row_stride, k_head_stride;
  int64_t rows, q_heads, k_heads;
  Indices positions;
  const float* cos_sin;  // contiguous [max_positions, 2 * half]
  int64_t max_positions, half;
};

// How a gated MLP's inner features come from its gate and up columns.
enum class Activation : int32_t {
  kSilu,         // silu(gate) * up
  kGeluTanh,     // gelu(gate) * up, with the tanh approximation
  kClampedSilu,  // gate * sigmoid(alpha * gate) * (up + 1), both clamped before
};

struct GatedMulArgs {
  DType dtype;
  Activation activation;
  float alpha, limit;  // of kClampedSilu
  const void* gate_up;
  int64_t row_stride;
  void* out;  // contiguous [rows, width]
  int64_t rows, width;
};

struct SoftCapArgs {
  DType dtype;
  void* x;  // [rows, width], becomes cap * tanh(x / cap)
  int64_t row_stride, rows, width;
  float cap;
};

struct SigmoidGateArgs {
  DType dtype;
  void* x;
  int64_t x_row_stride, x_head_stride;  // row r is x[r / heads][r % heads]
  const void* gate;
  int64_t gate_row_stride, gate_head_stride;
  int64_t rows, heads, width;
};

struct DeltaGatesArgs {
  DType dtype;
  const void* a;
  const void* b;
  int64_t a_row_stride, b_row_stride;
  const float* A_log;
  const float* dt_bias;
  float* log_decay;  // contiguous [rows, heads], as is beta
  float* beta;
  int64_t rows, heads;
};

// Which state each row continues, and where its own goes: see rollout/ops/state_plan.py.
struct StatePlan {
  const int32_t* q_offsets;
  const int32_t* sources;
  const int32_t* parents;
  const int32_t* targets;
  int64_t entries;

  int64_t rows() const { return q_offsets[entries]; }
};

constexpr int32_t kNoState = 0;

struct CausalConvArgs {
  DType dtype;
  const void* x;
  int64_t x_row_stride;
  const void* weight;  // contiguous [channels, taps]
  const void* bias;    // or null
  void* states;        // [slots, channels, taps - 1], a slot contiguous
  int64_t slot_stride;
  void* out;  // contiguous [rows, channels]
  int64_t rows, channels, taps;
  StatePlan plan;
};

constexpr int64_t kConvChannels = 256;  // that one call of the kernel convolves

// Bytes of scratch for a block of channels: weights and a state by tap, and a pointer for each tap.
constexpr int64_t conv_scratch_bytes(int64_t taps) {
  return taps * static_cast<int64_t>(sizeof(void*)) + 2 * taps * kConvChannels * 4;
}

struct DeltaRuleArgs {
  DType dtype;
  const void* q;
  const void* k;
  const void* v;
  int64_t q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  const float* log_decay;
  const float* beta;
  int64_t log_decay_row_stride, beta_row_stride;
  float* states;  // [slots, heads, key_dim, value_dim], a slot contiguous
  int64_t slot_stride;
  void* out;  // contiguous [rows, heads, value_dim]
  int64_t rows, key_heads, heads, key_dim, value_dim;
  StatePlan plan;
};

constexpr int64_t kStateColumns = 64;  // of the values, that one call of the kernel goes through

// Floats of scratch for a block of columns: a state, a query and a key.
constexpr int64_t delta_rule_scratch_floats(int64_t key_dim) {
  return key_dim * (kStateColumns + 2);
}

struct AttentionArgs {
  DType dtype;
  const void* q;
  int64_t q_row_stride, q_head_stride;
  const void* k_pool;
  const void* v_pool;
  int64_t k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;
  void* out;                                     // contiguous [rows, kv_heads * group, value_dim]
  int64_t kv_heads, group, head_dim, value_dim;  // value_dim <= head_dim
  float scale;
  int64_t window;      // keys that a row sees at most, its own included
  float soft_cap;      // or 0: scores become soft_cap * tanh(score / soft_cap)
  const float* sinks;  // or null: [kv_heads * group], weights by these scores add no value
};

struct HeadMatmulArgs {
  DType dtype;
  const void* x;        // [rows, heads, inputs]
  const void* weights;  // contiguous [heads, inputs, outputs]
  void* out;            // [rows, heads, outputs]
  int64_t x_row_stride, x_head_stride, out_row_stride, out_head_stride;
  int64_t rows, heads, inputs, outputs;
};

constexpr int64_t kHeadRows = 48;  // of one head, that one call of the kernel multiplies

// Floats of scratch for a block of rows; the bound holds for every instruction set.
constexpr int64_t head_matmul_scratch_floats(int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t padded = (outputs + 15) / 16 * 16;
  // The last row of x is stored in whole vectors.
  return rows * (padded + inputs) + 16 + (padded == outputs ? 0 : inputs * padded);
}

constexpr int kMaxTailKeys = 64;

// Consecutive query rows of one entry. All see the keys of `shared_slots`; row r then sees the tail
// keys whose bits are set in tail_masks[r], in order. A causal run is a chain, so runs and trees
// are one case: a row's keys in position order, whatever shares its tile.
struct AttentionTile {
  const int32_t* shared_slots;
  const int32_t* tail_slots;
  const uint64_t* tail_masks;
  int32_t shared_len, tail_len;
  int32_t first_row, rows;
};

// Floats of scratch one tile needs; the bound holds for every instruction set.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t group, int64_t head_dim,
                                           int64_t max_len) {
  const int64_t padded_dim = (head_dim + 15) / 16 * 16;
  const int64_t row_heads = rows * group;
  const int64_t score_stride = (max_len + 63) / 64 * 64 + 16;
  return row_heads * (2 * padded_dim + score_stride + kMaxTailKeys + 1) + 2 * 64 * padded_dim + 128;
}

constexpr int64_t kVocabBlock = 256;  // tokens whose probabilities are summed in float32

struct CategoricalArgs {
  DType dtype;
  const void* logits;
  int64_t row_stride, vocab;
  const float* temperature;
  const double* uniform;        // categorical
  const float* threshold;       // categorical: what is below is not drawn; null: all may be
  const int64_t* given_tokens;  // token_logprobs: [rows, tokens_per_row], -1 where there is none
  int64_t tokens_per_row;
  int64_t* tokens;  // categorical
  float* out;       // logprobs or entropies
};

constexpr int64_t kMaxGuessCandidates = 64;

// The guesses of a draft: see rollout/ops/draft_guesses.
struct GuessArgs {
  DType dtype;
  const void* logits;
  int64_t row_stride, vocab;
  const int64_t* trees;   // of each row
  const int64_t* levels;  // of each row; null: `level` of all
  int64_t level;
  const float* temperature;  // of each tree; above 0
  const float* near;         // of each tree
  const float* uniforms;     // [trees, levels_per_tree]
  int64_t levels_per_tree;
  const float* ratios;       // of each level
  const int64_t* token_ids;  // the target's tokens; null: the same
  int64_t candidates, children;
  float near_share;
  int64_t* tokens;  // [rows, children]
  float* probs;     // the same
};

constexpr int64_t guess_blocks(int64_t vocab) { return (vocab + kVocabBlock - 1) / kVocabBlock; }

constexpr int64_t guess_scratch_bytes(int64_t vocab) {
  return guess_blocks(vocab) * (8 + kVocabBlock * 4) + 8;
}

constexpr int64_t kPanelLanes = 64, kTilePanelLanes = 32;

// A weight as oneDNN packs it, in panels of 64 rows, or for tiles, in panels of 32. A panel is
// [units][lanes] words, a word being one float32 or two adjacent 16-bit numbers of a row. Rows
// [first_row, first_row + num_rows) are moved, from or to `rows`; all else in the panels stays, the
// zeros that fill up units and lanes included.
struct PanelArgs {
  DType dtype;
  void* panels;
  int64_t panel_stride, lanes;
  void* rows;
  int64_t row_stride;
  int64_t first_row, num_rows, inputs;
};

// out = x times the transposed weight in the panels, plus the bias, all bfloat16. For tile_matmul
// the panels end with zeros up to a multiple of 32 inputs.
struct PanelMatmulArgs {
  const void* x;
  int64_t x_row_stride;
  const void* panels;
  int64_t panel_stride;
  const void* bias;  // or null
  void* out;         // contiguous [rows, outputs]
  int64_t rows, inputs, outputs;
  int64_t block;  // panel_matmul: inputs that are summed in one chain; even, as inputs are
};

struct Kernels {
  void (*rms_norm)(const RmsNormArgs& args, int64_t begin, int64_t end);
  void (*rotary)(const RotaryArgs& args, int64_t begin, int64_t end);
  void (*gated_mul)(const GatedMulArgs& args, int64_t begin, int64_t end);
  void (*soft_cap)(const SoftCapArgs& args, int64_t begin, int64_t end);
  void (*sigmoid_gate)(const SigmoidGateArgs& args, int64_t begin, int64_t end);
  void (*delta_gates)(const DeltaGatesArgs& args, int64_t begin, int64_t end);
  void (*causal_conv)(const CausalConvArgs& args, int64_t first_channel, void* scratch);
  void (*delta_rule)(const DeltaRuleArgs& args, int64_t entry, int64_t head, int64_t first_column,
                     float* scratch);
  void (*attend)(const AttentionArgs& args, const AttentionTile& tile, int64_t kv_head,
                 float* scratch);
  void (*head_matmul)(const HeadMatmulArgs& args, int64_t head, int64_t begin, int64_t end,
                      float* scratch);
  // block_sums: scratch of ceil(vocab / kVocabBlock) floats.
  void (*categorical)(const CategoricalArgs& args, int64_t row, float* block_sums);
  void (*token_logprobs)(const CategoricalArgs& args, int64_t row, float* block_sums);
  void (*entropy)(const CategoricalArgs& args, int64_t row);
  void (*guesses)(const GuessArgs& args, int64_t row, void* scratch);
  void (*write_panel)(const PanelArgs& args, int64_t panel);
  void (*read_panel)(const PanelArgs& args, int64_t panel);
  // sums: scratch of rows x kPanelLanes floats. Null where the instruction set lacks it.
  void (*panel_matmul)(const PanelMatmulArgs& args, int64_t first_panel, int64_t end, float* sums);
  void (*tile_matmul)(const PanelMatmulArgs& args, int64_t first_panel, int64_t end);  // or null
};

const Kernels& kernels();  // the best this processor runs
const char* instruction_set();
bool has_panel_matmul();  // whether they and this processor have it
bool has_tile_matmul();   // whether the instruction set in use includes it

}  // namespace rollout
