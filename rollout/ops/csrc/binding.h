// What the binding's files share: tensors come as address, shape and strides in elements.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "recording.h"

namespace rollout::binding {

namespace nb = nanobind;
using namespace nb::literals;

using Address = uintptr_t;
using Dims2 = std::array<int64_t, 2>;
using Dims3 = std::array<int64_t, 3>;
using Dims4 = std::array<int64_t, 4>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// An argument of an op as its recorded call holds it: values as they are, bound objects by
// reference, kept alive.
template <typename T>
class Held {
 public:
  explicit Held(const T& value) : value_(value) {}
  const T& get() const { return value_; }

 private:
  T value_;
};

template <typename T>
class Held<const T&> {
 public:
  explicit Held(const T& object) : object_(&object) {
    nb::gil_scoped_acquire locked;
    owner_ = nb::find(object);
  }
  const T& get() const { return *object_; }

 private:
  const T* object_;
  nb::object owner_;
};

// An op that adds its calls to the thread's recording, if there is one.
template <auto Op>
struct Recorded;

template <typename... Args, void (*Op)(Args...)>
struct Recorded<Op> {
  static void call(Args... args) {
    Op(args...);
    if (Recording* recording = Recording::current()) {
      recording->add([held = std::make_tuple(Held<Args>(args)...)] {
        std::apply([](const auto&... each) { Op(each.get()...); }, held);
      });
    }
  }
};

template <auto Op>
constexpr auto recorded = &Recorded<Op>::call;

// Ops of recurrent layers and their gates.
void bind_recurrent(nb::module_& m);

// What neural drafts compute beside their networks.
void bind_drafts(nb::module_& m);

}  // namespace rollout::binding
