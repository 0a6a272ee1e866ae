// Python's view of the ops. Tensors come as address, shape and strides in elements: a tensor
// exchange would cost more than a small op. The callers, rollout/ops/*/native.py, have checked
// device, dtype and that the last dimension is adjacent; what is checked here is that sizes agree.
#include "binding.h"

#include <span>

#include "attention_schedule.h"
#include "ops.h"
#include "parallel.h"

namespace {

using namespace rollout::binding;
using rollout::DType;

template <typename T>
std::span<const T> view(Address address, int64_t count) {
  return {at<const T>(address), static_cast<size_t>(count)};
}

void rms_norm(int dtype, Address x, Dims3 shape, Dims3 strides, Address weight, int64_t weight_len,
              float eps, bool unit_offset, Address out, int threads) {
  require(weight_len == shape[2], "weight_E: its length must be x's last dimension");
  rollout::rms_norm({.dtype = DType{dtype},
                     .x = at(x),
                     .x_row_stride = strides[0],
                     .x_head_stride = strides[1],
                     .residual = nullptr,
                     .residual_row_stride = 0,
                     .weight = at(weight),
                     .unit_offset = unit_offset,
                     .gate = nullptr,
                     .gate_row_stride = 0,
                     .gate_head_stride = 0,
                     .out = at(out),
                     .rows = shape[0] * shape[1],
                     .heads = shape[1],
                     .width = shape[2],
                     .eps = eps},
                    threads);
}

void add_rms_norm(int dtype, Address x, Dims2 shape, Dims2 strides, Address residual,
                  Dims2 residual_shape, Dims2 residual_strides, Address weight, int64_t weight_len,
                  float eps, bool unit_offset, Address out, int threads) {
  require(weight_len == shape[1], "weight_E: its length must be x's last dimension");
  require(residual_shape == shape, "residual_TE: must have x's shape");
  rollout::rms_norm({.dtype = DType{dtype},
                     .x = at(x),
                     .x_row_stride = strides[0],
                     .x_head_stride = 0,
                     .residual = at(residual),
                     .residual_row_stride = residual_strides[0],
                     .weight = at(weight),
                     .unit_offset = unit_offset,
                     .gate = nullptr,
                     .gate_row_stride = 0,
                     .gate_head_stride = 0,
                     .out = at(out),
                     .rows = shape[0],
                     .heads = 1,
                     .width = shape[1],
                     .eps = eps},
                    threads);
}

void rotary(int dtype, Address q, Dims3 q_shape, Dims3 q_strides, Address k, Dims3 k_shape,
            Dims3 k_strides, Address positions, int64_t positions_len, bool wide_positions,
            Address cos_sin, Dims2 cos_sin_shape, int threads) {
  require(k_shape[0] == q_shape[0] && k_shape[2] == q_shape[2],
          "k_TKD: must have q's rows and head_dim");
  require(positions_len == q_shape[0], "positions_T: must have one position per row");
  require(cos_sin_shape[1] % 2 == 0 && cos_sin_shape[1] <= q_shape[2],
          "cos_sin_PR: R must be even and at most head_dim");
  rollout::rotary({.dtype = DType{dtype},
                   .q = at(q),
                   .k = at(k),
                   .q_row_stride = q_strides[0],
                   .q_head_stride = q_strides[1],
                   .k_row_stride = k_strides[0],
                   .k_head_stride = k_strides[1],
                   .rows = q_shape[0],
                   .q_heads = q_shape[1],
                   .k_heads = k_shape[1],
                   .positions = {at(positions), wide_positions},
                   .cos_sin = at<const float>(cos_sin),
                   .max_positions = cos_sin_shape[0],
                   .half = cos_sin_shape[1] / 2},
                  threads);
}

void store_kv(int dtype, Dims3 shape, Address k, Dims3 k_strides, Address v, Dims3 v_shape,
              Dims3 v_strides, Dims3 pool_shape, Address k_pool, Dims3 k_pool_strides,
              Address v_pool, Dims3 v_pool_shape, Dims3 v_pool_strides, Address slots,
              int64_t slots_len, bool wide_slots, int threads) {
  require(v == 0 || v_shape == shape, "v_TKD: must have k's shape");
  require(v == 0 || v_pool_shape == pool_shape, "v_pool_SKD: must have k_pool's shape");
  require(pool_shape[1] == shape[1] && pool_shape[2] == shape[2],
          "k_pool_SKD: must have k's heads and head_dim");
  require(slots_len == shape[0], "slots_T: must have one slot per row");
  rollout::store_kv({.dtype = DType{dtype},
                     .k = at(k),
                     .v = at(v),
                     .k_row_stride = k_strides[0],
                     .k_head_stride = k_strides[1],
                     .v_row_stride = v_strides[0],
                     .v_head_stride = v_strides[1],
                     .k_pool = at(k_pool),
                     .v_pool = at(v_pool),
                     .k_slot_stride = k_pool_strides[0],
                     .k_pool_head_stride = k_pool_strides[1],
                     .v_slot_stride = v_pool_strides[0],
                     .v_pool_head_stride = v_pool_strides[1],
                     .rows = shape[0],
                     .heads = shape[1],
                     .head_dim = shape[2],
                     .num_slots = pool_shape[0],
                     .slots = {at(slots), wide_slots}},
                    threads);
}

void gated_mul(int dtype, int activation, float alpha, float limit, Address gate_up, Dims2 shape,
               Dims2 strides, Address out, int threads) {
  require(shape[1] % 2 == 0, "gate_up_T2F: its last dimension must be even");
  rollout::gated_mul({.dtype = DType{dtype},
                      .activation = rollout::Activation{activation},
                      .alpha = alpha,
                      .limit = limit,
                      .gate_up = at(gate_up),
                      .row_stride = strides[0],
                      .out = at(out),
                      .rows = shape[0],
                      .width = shape[1] / 2},
                     threads);
}

void soft_cap(int dtype, Address x, Dims2 shape, Dims2 strides, float cap, int threads) {
  rollout::soft_cap({.dtype = DType{dtype},
                     .x = at(x),
                     .row_stride = strides[0],
                     .rows = shape[0],
                     .width = shape[1],
                     .cap = cap},
                    threads);
}

void make_schedule(nb::pointer_and_handle<rollout::AttentionSchedule> self, Address req_to_token,
                   Dims2 table_shape, int64_t table_row_stride, int64_t entries, int64_t nodes,
                   Address rows, Address q_offsets, Address starts, Address run_lens,
                   Address node_offsets, Address node_masks, Address node_slots, Dims3 q_shape,
                   Dims3 pool_shape) {
  const auto made = [=] {
    return rollout::AttentionSchedule({.req_to_token = at<const int32_t>(req_to_token),
                                       .table_rows = table_shape[0],
                                       .max_context = table_shape[1],
                                       .table_row_stride = table_row_stride,
                                       .rows = view<int32_t>(rows, entries),
                                       .q_offsets = view<int32_t>(q_offsets, entries + 1),
                                       .starts = view<int32_t>(starts, entries),
                                       .run_lens = view<int32_t>(run_lens, entries),
                                       .node_offsets = view<int32_t>(node_offsets, entries + 1),
                                       .node_masks = view<int64_t>(node_masks, nodes),
                                       .node_slots = view<int32_t>(node_slots, nodes)},
                                      {.query_rows = q_shape[0],
                                       .heads = q_shape[1],
                                       .kv_heads = pool_shape[1],
                                       .slots = pool_shape[0]});
  };
  rollout::AttentionSchedule* schedule = new (self.p) rollout::AttentionSchedule(made());
  if (rollout::Recording* recording = rollout::Recording::current()) {
    recording->add([made, schedule, owner = nb::borrow(self.h)] { *schedule = made(); });
  }
}

bool fits(const rollout::AttentionSchedule& schedule, Dims3 q_shape, Dims3 pool_shape) {
  return schedule.sizes() == rollout::AttentionSizes{.query_rows = q_shape[0],
                                                     .heads = q_shape[1],
                                                     .kv_heads = pool_shape[1],
                                                     .slots = pool_shape[0]};
}

void paged_attention(const rollout::AttentionSchedule& schedule, int dtype, Address q,
                     Dims3 q_shape, Dims3 q_strides, Dims3 pool_shape, Address k_pool,
                     Dims3 k_strides, Address v_pool, Dims3 v_shape, Dims3 v_strides, float scale,
                     int64_t window, float soft_cap, Address sinks, int64_t sinks_len, Address out,
                     int threads) {
  require(fits(schedule, q_shape, pool_shape), "the schedule was made for other sizes");
  require(v_shape[0] == pool_shape[0] && v_shape[1] == pool_shape[1] && v_shape[2] <= pool_shape[2],
          "v_pool_SKV: must have k_pool's slots and heads, and no more dims");
  require(pool_shape[2] == q_shape[2], "k_pool_SKD: must have q's head_dim");
  require(window >= 1, "AttentionVariant.window: must be >= 1");
  require(sinks == 0 || sinks_len == q_shape[1], "AttentionVariant.sinks_H: must have q's heads");
  rollout::paged_attention({.dtype = DType{dtype},
                            .q = at(q),
                            .q_row_stride = q_strides[0],
                            .q_head_stride = q_strides[1],
                            .k_pool = at(k_pool),
                            .v_pool = at(v_pool),
                            .k_slot_stride = k_strides[0],
                            .k_head_stride = k_strides[1],
                            .v_slot_stride = v_strides[0],
                            .v_head_stride = v_strides[1],
                            .out = at(out),
                            .kv_heads = pool_shape[1],
                            .group = q_shape[1] / pool_shape[1],
                            .head_dim = q_shape[2],
                            .value_dim = v_shape[2],
                            .scale = scale,
                            .window = window,
                            .soft_cap = soft_cap,
                            .sinks = at<const float>(sinks)},
                           schedule, threads);
}

void head_matmul(int dtype, Address x, Dims3 shape, Dims3 strides, Address weights,
                 Dims3 weights_shape, Address out, Dims3 out_shape, Dims3 out_strides,
                 int threads) {
  require(weights_shape[0] == shape[1] && weights_shape[1] == shape[2],
          "weights_HIO: must have x's heads and inputs");
  require(out_shape == Dims3{shape[0], shape[1], weights_shape[2]},
          "out_THO: must have x's rows and heads, and the weights' outputs");
  rollout::head_matmul({.dtype = DType{dtype},
                        .x = at(x),
                        .weights = at(weights),
                        .out = at(out),
                        .x_row_stride = strides[0],
                        .x_head_stride = strides[1],
                        .out_row_stride = out_strides[0],
                        .out_head_stride = out_strides[1],
                        .rows = shape[0],
                        .heads = shape[1],
                        .inputs = shape[2],
                        .outputs = weights_shape[2]},
                       threads);
}

rollout::CategoricalArgs logits_args(int dtype, Address logits, Dims2 shape, Dims2 strides,
                                     Address temperature, int64_t temperatures, Address out) {
  require(temperatures == shape[0], "temperature_R: must have one temperature per row");
  return {.dtype = DType{dtype},
          .logits = at(logits),
          .row_stride = strides[0],
          .vocab = shape[1],
          .temperature = at<const float>(temperature),
          .uniform = nullptr,
          .threshold = nullptr,
          .given_tokens = nullptr,
          .tokens_per_row = 0,
          .tokens = nullptr,
          .out = at<float>(out)};
}

void categorical(int dtype, Address logits, Dims2 shape, Dims2 strides, Address temperature,
                 int64_t temperatures, Address uniform, int64_t uniforms, Address threshold,
                 int64_t thresholds, Address tokens, Address logprobs, int threads) {
  require(uniforms == shape[0], "uniform_R: must have one number per row");
  require(threshold == 0 || thresholds == shape[0], "threshold_R: must have one logit per row");
  auto args = logits_args(dtype, logits, shape, strides, temperature, temperatures, logprobs);
  args.uniform = at<const double>(uniform);
  args.threshold = at<const float>(threshold);
  args.tokens = at<int64_t>(tokens);
  rollout::categorical(args, shape[0], threads);
}

void token_logprobs(int dtype, Address logits, Dims2 shape, Dims2 strides, Address temperature,
                    int64_t temperatures, Address tokens, Dims2 tokens_shape, Address logprobs,
                    int threads) {
  require(tokens_shape[0] == shape[0], "tokens_R: must have tokens of each row");
  auto args = logits_args(dtype, logits, shape, strides, temperature, temperatures, logprobs);
  args.given_tokens = at<const int64_t>(tokens);
  args.tokens_per_row = tokens_shape[1];
  rollout::token_logprobs(args, shape[0], threads);
}

void entropy(int dtype, Address logits, Dims2 shape, Dims2 strides, Address temperature,
             int64_t temperatures, Address out, int threads) {
  rollout::entropy(logits_args(dtype, logits, shape, strides, temperature, temperatures, out),
                   shape[0], threads);
}

void uniforms(Address seeds, int64_t seeds_len, Address positions, int64_t positions_len,
              Address out) {
  require(seeds_len == positions_len, "positions_R: must have one position per seed");
  rollout::uniforms(at<const uint64_t>(seeds), at<const uint64_t>(positions), seeds_len,
                    at<double>(out));
}

rollout::PanelArgs panel_args(int dtype, Address panels, Dims3 panels_shape, Address rows,
                              Dims2 shape, Dims2 strides, int64_t first_row) {
  const int64_t elements = 4 / rollout::element_bytes(DType{dtype});
  const int64_t lanes = panels_shape[2] / elements;
  require(panels_shape[2] % elements == 0 &&
              (lanes == rollout::kPanelLanes || lanes == rollout::kTilePanelLanes),
          "panels_PUL: a unit is 32 or 64 words");
  require(shape[1] <= panels_shape[1] * elements, "rows_MI: too wide for the panels");
  require(first_row >= 0 && first_row + shape[0] <= panels_shape[0] * lanes,
          "rows_MI: beyond the last panel");
  return {.dtype = DType{dtype},
          .panels = at(panels),
          .panel_stride = panels_shape[1] * panels_shape[2],
          .lanes = lanes,
          .rows = at(rows),
          .row_stride = strides[0],
          .first_row = first_row,
          .num_rows = shape[0],
          .inputs = shape[1]};
}

void write_panels(int dtype, Address panels, Dims3 panels_shape, Address rows, Dims2 shape,
                  Dims2 strides, int64_t first_row, int threads) {
  rollout::write_panels(panel_args(dtype, panels, panels_shape, rows, shape, strides, first_row),
                        threads);
}

void read_panels(int dtype, Address panels, Dims3 panels_shape, Address rows, Dims2 shape,
                 Dims2 strides, int64_t first_row, int threads) {
  rollout::read_panels(panel_args(dtype, panels, panels_shape, rows, shape, strides, first_row),
                       threads);
}

rollout::PanelMatmulArgs product_args(Address x, Dims2 x_shape, Dims2 x_strides, Address panels,
                                      Dims3 panels_shape, int64_t lanes, int64_t outputs,
                                      Address bias, Address out) {
  require(panels_shape[2] == 2 * lanes, "panels_PUL: a unit has another number of words");
  require(x_shape[1] > 0 && x_shape[1] <= 2 * panels_shape[1],
          "x_MI: its inputs must be those of the panels");
  require(outputs <= panels_shape[0] * lanes, "panels_PUL: too few for the outputs");
  return {.x = at(x),
          .x_row_stride = x_strides[0],
          .panels = at(panels),
          .panel_stride = panels_shape[1] * panels_shape[2],
          .bias = at(bias),
          .out = at(out),
          .rows = x_shape[0],
          .inputs = x_shape[1],
          .outputs = outputs,
          .block = 0};
}

void panel_matmul(Address x, Dims2 x_shape, Dims2 x_strides, Address panels, Dims3 panels_shape,
                  int64_t outputs, Address bias, Address out, int64_t block, int threads) {
  require(rollout::has_panel_matmul(), "panel_matmul: this processor lacks it");
  require(x_shape[1] % 2 == 0, "x_MI: its inputs must be even");
  require(block > 0 && block % 2 == 0, "sum_block: must be positive and even");
  auto args = product_args(x, x_shape, x_strides, panels, panels_shape, rollout::kPanelLanes,
                           outputs, bias, out);
  args.block = block;
  rollout::panel_matmul(args, threads);
}

void tile_matmul(Address x, Dims2 x_shape, Dims2 x_strides, Address panels, Dims3 panels_shape,
                 int64_t outputs, Address bias, Address out, int threads) {
  require(rollout::has_tile_matmul(), "tile_matmul: this processor lacks it");
  require(panels_shape[1] % 16 == 0, "panels_PUL: must end with whole tiles of 32 inputs");
  rollout::tile_matmul(product_args(x, x_shape, x_strides, panels, panels_shape,
                                    rollout::kTilePanelLanes, outputs, bias, out),
                       threads);
}

void start(rollout::Recording& recording) {
  require(rollout::Recording::current() == nullptr, "Recording.start: this thread records already");
  rollout::Recording::current() = &recording;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "The engine's ops on CPU tensors, by address. See rollout.ops for what they compute.";
  m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  m.def("instruction_set", &rollout::instruction_set,
        "Which kernels run: avx512, avx2 or generic.");
  m.def("set_gomp_parallel", &rollout::set_gomp_parallel, "address"_a,
        "Hand over GOMP_parallel of the OpenMP runtime to run on; 0 is serial.");

  m.def("rms_norm", recorded<rms_norm>, "dtype"_a, "x"_a, "shape"_a, "strides"_a, "weight"_a,
        "weight_len"_a, "eps"_a, "unit_offset"_a, "out"_a, "threads"_a, Unlocked());
  m.def("add_rms_norm", recorded<add_rms_norm>, "dtype"_a, "x"_a, "shape"_a, "strides"_a,
        "residual"_a, "residual_shape"_a, "residual_strides"_a, "weight"_a, "weight_len"_a, "eps"_a,
        "unit_offset"_a, "out"_a, "threads"_a, Unlocked());
  m.def("rotary", recorded<rotary>, "dtype"_a, "q"_a, "q_shape"_a, "q_strides"_a, "k"_a,
        "k_shape"_a, "k_strides"_a, "positions"_a, "positions_len"_a, "wide_positions"_a,
        "cos_sin"_a, "cos_sin_shape"_a, "threads"_a, Unlocked());
  m.def("store_kv", recorded<store_kv>, "dtype"_a, "shape"_a, "k"_a, "k_strides"_a, "v"_a,
        "v_shape"_a, "v_strides"_a, "pool_shape"_a, "k_pool"_a, "k_pool_strides"_a, "v_pool"_a,
        "v_pool_shape"_a, "v_pool_strides"_a, "slots"_a, "slots_len"_a, "wide_slots"_a, "threads"_a,
        Unlocked());
  m.def("gated_mul", recorded<gated_mul>, "dtype"_a, "activation"_a, "alpha"_a, "limit"_a,
        "gate_up"_a, "shape"_a, "strides"_a, "out"_a, "threads"_a, Unlocked());
  m.def("soft_cap", recorded<soft_cap>, "dtype"_a, "x"_a, "shape"_a, "strides"_a, "cap"_a,
        "threads"_a, Unlocked());

  nb::class_<rollout::AttentionSchedule>(
      m, "AttentionSchedule", "An AttentionPlan checked and cut into tiles; it borrows the arrays.")
      .def("__init__", &make_schedule, "req_to_token"_a, "table_shape"_a, "table_row_stride"_a,
           "entries"_a, "nodes"_a, "rows"_a, "q_offsets"_a, "starts"_a, "run_lens"_a,
           "node_offsets"_a, "node_masks"_a, "node_slots"_a, "q_shape"_a, "pool_shape"_a)
      .def("fits", &fits, "q_shape"_a, "pool_shape"_a);
  m.def("paged_attention", recorded<paged_attention>, "schedule"_a, "dtype"_a, "q"_a, "q_shape"_a,
        "q_strides"_a, "pool_shape"_a, "k_pool"_a, "k_strides"_a, "v_pool"_a, "v_shape"_a,
        "v_strides"_a, "scale"_a, "window"_a, "soft_cap"_a, "sinks"_a, "sinks_len"_a, "out"_a,
        "threads"_a, Unlocked());

  m.def("head_matmul", recorded<head_matmul>, "dtype"_a, "x"_a, "shape"_a, "strides"_a, "weights"_a,
        "weights_shape"_a, "out"_a, "out_shape"_a, "out_strides"_a, "threads"_a, Unlocked());

  m.def("categorical", recorded<categorical>, "dtype"_a, "logits"_a, "shape"_a, "strides"_a,
        "temperature"_a, "temperatures"_a, "uniform"_a, "uniforms"_a, "threshold"_a, "thresholds"_a,
        "tokens"_a, "logprobs"_a, "threads"_a, Unlocked());
  m.def("token_logprobs", recorded<token_logprobs>, "dtype"_a, "logits"_a, "shape"_a, "strides"_a,
        "temperature"_a, "temperatures"_a, "tokens"_a, "tokens_shape"_a, "logprobs"_a, "threads"_a,
        Unlocked());
  m.def("entropy", recorded<entropy>, "dtype"_a, "logits"_a, "shape"_a, "strides"_a,
        "temperature"_a, "temperatures"_a, "out"_a, "threads"_a, Unlocked());

  m.def("uniforms", recorded<uniforms>, "seeds"_a, "seeds_len"_a, "positions"_a, "positions_len"_a,
        "out"_a, Unlocked());

  m.def("write_panels", recorded<write_panels>, "dtype"_a, "panels"_a, "panels_shape"_a, "rows"_a,
        "shape"_a, "strides"_a, "first_row"_a, "threads"_a, Unlocked());
  m.def("read_panels", recorded<read_panels>, "dtype"_a, "panels"_a, "panels_shape"_a, "rows"_a,
        "shape"_a, "strides"_a, "first_row"_a, "threads"_a, Unlocked());
  m.def("has_panel_matmul", &rollout::has_panel_matmul,
        "Whether this processor has the product of a few rows with a packed weight.");
  m.def("panel_matmul", recorded<panel_matmul>, "x"_a, "x_shape"_a, "x_strides"_a, "panels"_a,
        "panels_shape"_a, "outputs"_a, "bias"_a, "out"_a, "block"_a, "threads"_a, Unlocked());
  m.def("has_tile_matmul", &rollout::has_tile_matmul,
        "Whether this processor has tiles, and the instruction set in use includes them.");
  m.def("tile_matmul", recorded<tile_matmul>, "x"_a, "x_shape"_a, "x_strides"_a, "panels"_a,
        "panels_shape"_a, "outputs"_a, "bias"_a, "out"_a, "threads"_a, Unlocked());

  nb::class_<rollout::Recording>(m, "Recording",
                                 "Calls of ops, kept in order so that they can be made again. The "
                                 "caller keeps the arrays that they read and write.")
      .def(nb::init<>())
      .def("start", &start, "Record what this thread calls from now on.")
      .def("stop", &rollout::Recording::end, "Record no more.")
      .def("__len__", &rollout::Recording::size)
      .def("replay", &rollout::Recording::replay, "first"_a, "last"_a, Unlocked(),
           "Make calls [first, last) again, on whatever their arrays hold now.");

  bind_recurrent(m);
  bind_drafts(m);
}
