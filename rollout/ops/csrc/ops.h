// The ops over whole tensors: arguments checked, work cut into items, items run on threads.
#pragma once

#include <cstdint>

#include "attention_schedule.h"
#include "kernels.h"

namespace rollout {

struct StoreKvArgs {
  DType dtype;
  const void* k;
  const void* v;  // or null: only keys are stored
  int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  void* k_pool;
  void* v_pool;
  int64_t k_slot_stride, k_pool_head_stride, v_slot_stride, v_pool_head_stride;
  int64_t rows, heads, head_dim, num_slots;
  Indices slots;
};

// std::out_of_range for an index, std::invalid_argument for a size; nothing is written then.
void rms_norm(const RmsNormArgs& args, int threads);
void rotary(const RotaryArgs& args, int threads);
void store_kv(const StoreKvArgs& args, int threads);
void gated_mul(const GatedMulArgs& args, int threads);
void soft_cap(const SoftCapArgs& args, int threads);
void sigmoid_gate(const SigmoidGateArgs& args, int threads);
void delta_gates(const DeltaGatesArgs& args, int threads);
void paged_attention(const AttentionArgs& args, const AttentionSchedule& schedule, int threads);
void head_matmul(const HeadMatmulArgs& args, int threads);
void causal_conv(const CausalConvArgs& args, int64_t slots, int threads);
void gated_delta_rule(const DeltaRuleArgs& args, int64_t slots, int threads);
void categorical(const CategoricalArgs& args, int64_t rows, int threads);
void guesses(const GuessArgs& args, int64_t rows, int threads);
void token_logprobs(const CategoricalArgs& args, int64_t rows, int threads);
void entropy(const CategoricalArgs& args, int64_t rows, int threads);
void uniforms(const uint64_t* seeds, const uint64_t* positions, int64_t rows, double* out);
void write_panels(const PanelArgs& args, int threads);
void read_panels(const PanelArgs& args, int threads);
void panel_matmul(const PanelMatmulArgs& args, int threads);  // where has_panel_matmul()
void tile_matmul(const PanelMatmulArgs& args, int threads);   // where has_tile_matmul()

}  // namespace rollout
