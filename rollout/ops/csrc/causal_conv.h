// The short convolution of a block of channels, over all rows of a step.
//
// A row's inputs are those of its path, wherever they lie: its own and its ancestors' rows of x,
// before them the state its entry began with. So no row waits for another, and a row's bits are one
// chain of multiply-adds over its taps.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace rollout::ROLLOUT_ISA {
namespace {

template <typename T>
class ConvBlock {
 public:
  ConvBlock(const CausalConvArgs& args, int64_t first_channel, void* scratch)
      : args_(args),
        first_(first_channel),
        count_(args.channels - first_channel < kConvChannels ? args.channels - first_channel
                                                             : kConvChannels),
        inputs_(static_cast<const T**>(scratch)),
        weight_(reinterpret_cast<T*>(inputs_ + args.taps)),
        source_(weight_ + args.taps * kConvChannels) {}

  void run() {
    by_tap(static_cast<const T*>(args_.weight) + first_ * args_.taps, args_.taps, weight_);
    for (int64_t entry = 0; entry < args_.plan.entries; ++entry) {
      load_source(args_.plan.sources[entry]);
      for (int64_t row = args_.plan.q_offsets[entry]; row < args_.plan.q_offsets[entry + 1];
           ++row) {
        find_inputs(row);
        convolve(row);
        if (args_.plan.targets[row] != kNoState) store_state(args_.plan.targets[row]);
      }
    }
  }

 private:
  int64_t width() const { return args_.taps - 1; }  // of a state

  T* state(int64_t slot) const {
    return static_cast<T*>(args_.states) + slot * args_.slot_stride + first_ * width();
  }

  // to[tap][channel] = from[channel][tap]
  void by_tap(const T* from, int64_t taps, T* to) const {
    for (int64_t channel = 0; channel < count_; ++channel) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        to[tap * kConvChannels + channel] = from[channel * taps + tap];
      }
    }
  }

  void load_source(int32_t slot) {
    if (slot != kNoState) return by_tap(state(slot), width(), source_);
    std::memset(source_, 0, static_cast<size_t>(width() * kConvChannels) * sizeof(T));
  }

  // inputs_[tap], the row's own last.
  void find_inputs(int64_t row) {
    int64_t tap = args_.taps;
    while (tap > 0 && row >= 0) {
      inputs_[--tap] = static_cast<const T*>(args_.x) + row * args_.x_row_stride + first_;
      row = args_.plan.parents[row];
    }
    for (int64_t from_state = width(); tap > 0;) {
      inputs_[--tap] = source_ + --from_state * kConvChannels;
    }
  }

  void convolve(int64_t row) {
    const T* bias = static_cast<const T*>(args_.bias);
    T* out = static_cast<T*>(args_.out) + row * args_.channels + first_;
    for_each_vector(count_, [&](int64_t i, auto load_at, auto store_at) {
      Vec sum = bias != nullptr ? load_at(bias + first_ + i) : Vec{};
      for (int64_t tap = 0; tap < args_.taps; ++tap) {
        sum = fma(load_at(weight_ + tap * kConvChannels + i), load_at(inputs_[tap] + i), sum);
      }
      store_at(out + i, silu(sum));
    });
  }

  void store_state(int64_t slot) {
    T* to = state(slot);
    for (int64_t channel = 0; channel < count_; ++channel) {
      for (int64_t tap = 1; tap < args_.taps; ++tap) *to++ = inputs_[tap][channel];
    }
  }

  const CausalConvArgs& args_;
  const int64_t first_, count_;
  const T** const inputs_;
  T* const weight_;  // [taps][kConvChannels]
  T* const source_;  // [taps - 1][kConvChannels], of the entry
};

}  // namespace
}  // namespace rollout::ROLLOUT_ISA
