// What the binding's files share: tensors come as address, shape and strides in elements.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <cstdint>
#include <stdexcept>

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

// Ops of recurrent layers and their gates.
void bind_recurrent(nb::module_& m);

}  // namespace rollout::binding
