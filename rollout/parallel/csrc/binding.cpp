// Python's view of an exchange. Tensors come as addresses; the caller has checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange.h"

namespace nb = nanobind;
using namespace nb::literals;
using rollout::Exchange;

namespace {

using Address = uintptr_t;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }

void gather_columns(Exchange& exchange, Address own, int64_t rows, int64_t stride,
                    const std::vector<int64_t>& ends, Address out, Address ahead,
                    size_t ahead_bytes) {
  exchange.gather_columns(at(own), rows, stride, ends, at(out), {at(ahead), ahead_bytes});
}

void broadcast(Exchange& exchange, Address data, int64_t bytes) {
  exchange.broadcast(at(data), bytes);
}

}  // namespace

NB_MODULE(_exchange, m) {
  m.doc() = "Exchanges between the ranks of one host, by address.";

  m.attr("SLOT_BYTES") = Exchange::kSlotBytes;

  nb::class_<Exchange>(m, "Exchange", "A rank's end of the memory that ranks exchange through.")
      .def_static("create", &Exchange::create, "size"_a, "timeout"_a, "Rank 0's.")
      .def_static("open", &Exchange::open, "path"_a, "rank"_a, "size"_a, "timeout"_a,
                  "Another rank's, of rank 0's path.")
      .def_prop_ro("path", &Exchange::path)
      .def("gather_columns", &gather_columns, "own"_a, "rows"_a, "stride"_a, "ends"_a, "out"_a,
           "ahead"_a, "ahead_bytes"_a, Unlocked())
      .def("broadcast", &broadcast, "data"_a, "bytes"_a, Unlocked())
      .def("gone", &Exchange::gone, "Ranks that have ended or left.")
      .def("leave", &Exchange::leave);
}
