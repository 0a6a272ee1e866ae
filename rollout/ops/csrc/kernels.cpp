// The kernels of one instruction set, ROLLOUT_ISA. See CMakeLists.txt for how it is compiled.
#include "kernels.h"

#include "attention.h"
#include "categorical.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "gated_mul.h"
#include "gates.h"
#include "guesses.h"
#include "head_matmul.h"
#include "panel_matmul.h"
#include "panels.h"
#include "rms_norm.h"
#include "rotary.h"
#include "tile_matmul.h"

namespace rollout::ROLLOUT_ISA {
namespace {

// Calls f(T{}) with the element type of `dtype`.
template <typename Function>
inline void with_type(DType dtype, const Function& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Half{});
  }
}

void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { rms_norm_rows<decltype(type)>(args, begin, end); });
}

void rotary(const RotaryArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { rotary_rows<decltype(type)>(args, begin, end); });
}

void gated_mul(const GatedMulArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { gated_mul_rows<decltype(type)>(args, begin, end); });
}

void soft_cap(const SoftCapArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { soft_cap_rows<decltype(type)>(args, begin, end); });
}

void sigmoid_gate(const SigmoidGateArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { sigmoid_gate_rows<decltype(type)>(args, begin, end); });
}

void delta_gates(const DeltaGatesArgs& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&](auto type) { delta_gates_rows<decltype(type)>(args, begin, end); });
}

void causal_conv(const CausalConvArgs& args, int64_t first_channel, void* scratch) {
  with_type(args.dtype,
            [&](auto type) { ConvBlock<decltype(type)>(args, first_channel, scratch).run(); });
}

void delta_rule(const DeltaRuleArgs& args, int64_t entry, int64_t head, int64_t first_column,
                float* scratch) {
  with_type(args.dtype, [&](auto type) {
    DeltaRuleBlock<decltype(type)>(args, entry, head, first_column, scratch).run();
  });
}

void attend(const AttentionArgs& args, const AttentionTile& tile, int64_t kv_head, float* scratch) {
  with_type(args.dtype,
            [&](auto type) { TileAttention<decltype(type)>(args, tile, kv_head, scratch).run(); });
}

void head_matmul(const HeadMatmulArgs& args, int64_t head, int64_t begin, int64_t end,
                 float* scratch) {
  with_type(args.dtype,
            [&](auto type) { head_matmul_rows<decltype(type)>(args, head, begin, end, scratch); });
}

void categorical(const CategoricalArgs& args, int64_t row, float* block_sums) {
  with_type(args.dtype, [&](auto type) { categorical_row<decltype(type)>(args, row, block_sums); });
}

void token_logprobs(const CategoricalArgs& args, int64_t row, float* block_sums) {
  with_type(args.dtype,
            [&](auto type) { token_logprobs_row<decltype(type)>(args, row, block_sums); });
}

void entropy(const CategoricalArgs& args, int64_t row) {
  with_type(args.dtype, [&](auto type) { entropy_row<decltype(type)>(args, row); });
}

void guesses(const GuessArgs& args, int64_t row, void* scratch) {
  with_type(args.dtype, [&](auto type) { RowGuesses<decltype(type)>(args, row, scratch).run(); });
}

template <bool kRead>
void move_panel(const PanelArgs& args, int64_t panel) {
  if (element_bytes(args.dtype) == 4) {
    move_panel<uint32_t, kRead>(args, panel);
  } else {
    move_panel<uint16_t, kRead>(args, panel);
  }
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {rms_norm,         rotary,         gated_mul,  soft_cap, sigmoid_gate,
                          delta_gates,      causal_conv,    delta_rule, attend,   head_matmul,
                          categorical,      token_logprobs, entropy,    guesses,  move_panel<false>,
                          move_panel<true>, kPanelMatmul,   kTileMatmul};

}  // namespace rollout::ROLLOUT_ISA
