#include "binding.h"
#include "ops.h"

namespace rollout::binding {
namespace {

void gated_rms_norm(int dtype, Address x, Dims3 shape, Dims3 strides, Address gate,
                    Dims3 gate_shape, Dims3 gate_strides, Address weight, int64_t weight_len,
                    float eps, Address out, int threads) {
  require(weight_len == shape[2], "weight_V: its length must be x's last dimension");
  require(gate_shape == shape, "gate_TGV: must have x's shape");
  rollout::rms_norm({.dtype = DType{dtype},
                     .x = at(x),
                     .x_row_stride = strides[0],
                     .x_head_stride = strides[1],
                     .residual = nullptr,
                     .residual_row_stride = 0,
                     .weight = at(weight),
                     .unit_offset = false,
                     .gate = at(gate),
                     .gate_row_stride = gate_strides[0],
                     .gate_head_stride = gate_strides[1],
                     .out = at(out),
                     .rows = shape[0] * shape[1],
                     .heads = shape[1],
                     .width = shape[2],
                     .eps = eps},
                    threads);
}

void sigmoid_gate(int dtype, Address x, Dims3 shape, Dims3 strides, Address gate, Dims3 gate_shape,
                  Dims3 gate_strides, int threads) {
  require(gate_shape == shape, "gate: must have x's shape");
  rollout::sigmoid_gate({.dtype = DType{dtype},
                         .x = at(x),
                         .x_row_stride = strides[0],
                         .x_head_stride = strides[1],
                         .gate = at(gate),
                         .gate_row_stride = gate_strides[0],
                         .gate_head_stride = gate_strides[1],
                         .rows = shape[0] * shape[1],
                         .heads = shape[1],
                         .width = shape[2]},
                        threads);
}

void delta_gates(int dtype, Address a, Dims2 shape, Dims2 strides, Address b, Dims2 b_shape,
                 Dims2 b_strides, Address A_log, int64_t A_log_len, Address dt_bias,
                 int64_t dt_bias_len, Address log_decay, Address beta, int threads) {
  require(b_shape == shape, "b_TG: must have a's shape");
  require(A_log_len == shape[1] && dt_bias_len == shape[1],
          "A_log_G, dt_bias_G: must have one number per head");
  rollout::delta_gates({.dtype = DType{dtype},
                        .a = at(a),
                        .b = at(b),
                        .a_row_stride = strides[0],
                        .b_row_stride = b_strides[0],
                        .A_log = at<const float>(A_log),
                        .dt_bias = at<const float>(dt_bias),
                        .log_decay = at<float>(log_decay),
                        .beta = at<float>(beta),
                        .rows = shape[0],
                        .heads = shape[1]},
                       threads);
}

// It borrows the arrays.
StatePlan make_plan(int64_t entries, int64_t rows, Address q_offsets, Address sources,
                    Address parents, int64_t num_parents, Address targets, int64_t num_targets) {
  require(num_parents == rows && num_targets == rows,
          "parents_T, targets_T: must have one number per row");
  return {.q_offsets = at<const int32_t>(q_offsets),
          .sources = at<const int32_t>(sources),
          .parents = at<const int32_t>(parents),
          .targets = at<const int32_t>(targets),
          .entries = entries};
}

void causal_conv(int dtype, Address x, Dims2 shape, Dims2 strides, Address weight,
                 Dims2 weight_shape, Address bias, int64_t bias_len, Address states,
                 Dims3 states_shape, int64_t slot_stride, int64_t entries, Address q_offsets,
                 Address sources, Address parents, int64_t num_parents, Address targets,
                 int64_t num_targets, Address out, int threads) {
  require(weight_shape[0] == shape[1] && weight_shape[1] > 0,
          "weight_CW: must have x's channels, and taps");
  require(bias == 0 || bias_len == shape[1], "bias_C: must have x's channels");
  require(states_shape[1] == shape[1] && states_shape[2] == weight_shape[1] - 1,
          "states_SCw: must have x's channels, and a tap less than the weight");
  rollout::causal_conv({.dtype = DType{dtype},
                        .x = at(x),
                        .x_row_stride = strides[0],
                        .weight = at(weight),
                        .bias = at(bias),
                        .states = at(states),
                        .slot_stride = slot_stride,
                        .out = at(out),
                        .rows = shape[0],
                        .channels = shape[1],
                        .taps = weight_shape[1],
                        .plan = make_plan(entries, shape[0], q_offsets, sources, parents,
                                          num_parents, targets, num_targets)},
                       states_shape[0], threads);
}

void gated_delta_rule(int dtype, Address q, Dims3 q_shape, Dims3 q_strides, Address k,
                      Dims3 k_shape, Dims3 k_strides, Address v, Dims3 v_shape, Dims3 v_strides,
                      Address log_decay, Dims2 log_decay_shape, Dims2 log_decay_strides,
                      Address beta, Dims2 beta_shape, Dims2 beta_strides, Address states,
                      Dims4 states_shape, int64_t slot_stride, int64_t entries, Address q_offsets,
                      Address sources, Address parents, int64_t num_parents, Address targets,
                      int64_t num_targets, Address out, int threads) {
  require(k_shape == q_shape, "k_THK: must have q's shape");
  require(v_shape[0] == q_shape[0], "v_TGV: must have q's rows");
  require(q_shape[1] > 0 && v_shape[1] % q_shape[1] == 0,
          "v_TGV: its heads must be a multiple of q's");
  const Dims2 gates{v_shape[0], v_shape[1]};
  require(log_decay_shape == gates && beta_shape == gates,
          "log_decay_TG, beta_TG: must have one number per row and head of v");
  require(states_shape[1] == v_shape[1] && states_shape[2] == q_shape[2] &&
              states_shape[3] == v_shape[2],
          "states_SGKV: must have v's heads, k's dimensions and v's");
  rollout::gated_delta_rule({.dtype = DType{dtype},
                             .q = at(q),
                             .k = at(k),
                             .v = at(v),
                             .q_row_stride = q_strides[0],
                             .q_head_stride = q_strides[1],
                             .k_row_stride = k_strides[0],
                             .k_head_stride = k_strides[1],
                             .v_row_stride = v_strides[0],
                             .v_head_stride = v_strides[1],
                             .log_decay = at<const float>(log_decay),
                             .beta = at<const float>(beta),
                             .log_decay_row_stride = log_decay_strides[0],
                             .beta_row_stride = beta_strides[0],
                             .states = at<float>(states),
                             .slot_stride = slot_stride,
                             .out = at(out),
                             .rows = q_shape[0],
                             .key_heads = q_shape[1],
                             .heads = v_shape[1],
                             .key_dim = q_shape[2],
                             .value_dim = v_shape[2],
                             .plan = make_plan(entries, q_shape[0], q_offsets, sources, parents,
                                               num_parents, targets, num_targets)},
                            states_shape[0], threads);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def("gated_rms_norm", recorded<gated_rms_norm>, "dtype"_a, "x"_a, "shape"_a, "strides"_a,
        "gate"_a, "gate_shape"_a, "gate_strides"_a, "weight"_a, "weight_len"_a, "eps"_a, "out"_a,
        "threads"_a, Unlocked());
  m.def("sigmoid_gate", recorded<sigmoid_gate>, "dtype"_a, "x"_a, "shape"_a, "strides"_a, "gate"_a,
        "gate_shape"_a, "gate_strides"_a, "threads"_a, Unlocked());
  m.def("delta_gates", recorded<delta_gates>, "dtype"_a, "a"_a, "shape"_a, "strides"_a, "b"_a,
        "b_shape"_a, "b_strides"_a, "A_log"_a, "A_log_len"_a, "dt_bias"_a, "dt_bias_len"_a,
        "log_decay"_a, "beta"_a, "threads"_a, Unlocked());
  m.def("causal_conv", recorded<causal_conv>, "dtype"_a, "x"_a, "shape"_a, "strides"_a, "weight"_a,
        "weight_shape"_a, "bias"_a, "bias_len"_a, "states"_a, "states_shape"_a, "slot_stride"_a,
        "entries"_a, "q_offsets"_a, "sources"_a, "parents"_a, "num_parents"_a, "targets"_a,
        "num_targets"_a, "out"_a, "threads"_a, Unlocked());
  m.def("gated_delta_rule", recorded<gated_delta_rule>, "dtype"_a, "q"_a, "q_shape"_a,
        "q_strides"_a, "k"_a, "k_shape"_a, "k_strides"_a, "v"_a, "v_shape"_a, "v_strides"_a,
        "log_decay"_a, "log_decay_shape"_a, "log_decay_strides"_a, "beta"_a, "beta_shape"_a,
        "beta_strides"_a, "states"_a, "states_shape"_a, "slot_stride"_a, "entries"_a, "q_offsets"_a,
        "sources"_a, "parents"_a, "num_parents"_a, "targets"_a, "num_targets"_a, "out"_a,
        "threads"_a, Unlocked());
}

}  // namespace rollout::binding
