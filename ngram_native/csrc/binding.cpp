// The Python face of Corpus. Arrays arrive checked by corpus.py; every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "byte_stream.h"
#include "corpus.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using In = nb::ndarray<const T, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

template <typename T>
std::span<const T> view(const In<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
Out<T> hand_over(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Out<T>(owned->data(), {owned->size()}, owner);
}

using Arrays = std::tuple<Out<std::int64_t>, Out<std::int32_t>, Out<std::int32_t>,
                          Out<std::int32_t>, Out<std::uint64_t>, Out<float>>;

Arrays hand_over(ngram::Proposal&& p) {
  return {hand_over(std::move(p.offsets)), hand_over(std::move(p.tokens)),
          hand_over(std::move(p.parents)), hand_over(std::move(p.depths)),
          hand_over(std::move(p.masks)),   hand_over(std::move(p.probabilities))};
}

}  // namespace

NB_MODULE(_ext, m) {
  using ngram::Corpus;
  const auto released = nb::call_guard<nb::gil_scoped_release>();

  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });

  nb::class_<Corpus>(m, "Corpus")
      .def(
          "__init__",
          [](Corpus* self, std::uint64_t max_bytes, std::uint64_t max_external_bytes,
             std::uint32_t max_candidates, std::uint32_t max_steps) {
            new (self)
                Corpus(ngram::Options{max_bytes, max_external_bytes, max_candidates, max_steps});
          },
          nb::kw_only(), "max_bytes"_a, "max_external_bytes"_a, "max_candidates"_a, "max_steps"_a)
      .def(
          "insert",
          [](Corpus& self, const In<std::int32_t>& tokens, std::optional<std::uint64_t> group) {
            self.insert(view(tokens), group);
          },
          "tokens"_a.noconvert(), "group"_a.none(), released)
      .def(
          "open",
          [](Corpus& self, std::int64_t sequence_id, std::uint64_t group,
             const In<std::int32_t>& tokens) { self.open(sequence_id, group, view(tokens)); },
          "sequence_id"_a, "group"_a, "tokens"_a.noconvert(), released)
      .def(
          "extend",
          [](Corpus& self, const In<std::int64_t>& sequence_ids, const In<std::int32_t>& tokens,
             const In<std::int64_t>& offsets) {
            self.extend(view(sequence_ids), view(tokens), view(offsets));
          },
          "sequence_ids"_a.noconvert(), "tokens"_a.noconvert(), "offsets"_a.noconvert(), released)
      .def(
          "propose",
          [](Corpus& self, const In<std::int64_t>& sequence_ids, const In<std::int32_t>& budgets,
             double min_probability) {
            ngram::Proposal proposal;
            {
              nb::gil_scoped_release release;
              proposal = self.propose(view(sequence_ids), view(budgets), min_probability);
            }
            return hand_over(std::move(proposal));
          },
          "sequence_ids"_a.noconvert(), "budgets"_a.noconvert(), "min_probability"_a)
      .def(
          "query",
          [](Corpus& self, std::uint64_t group, const In<std::int32_t>& tokens, std::int32_t budget,
             double min_probability) {
            ngram::Proposal proposal;
            {
              nb::gil_scoped_release release;
              proposal = self.query(group, view(tokens), budget, min_probability);
            }
            return hand_over(std::move(proposal));
          },
          "group"_a, "tokens"_a.noconvert(), "budget"_a, "min_probability"_a)
      .def("close", &Corpus::close, "sequence_id"_a, released)
      .def("set_weight_version", &Corpus::set_weight_version, "version"_a, released)
      .def(
          "add_external",
          [](Corpus& self, const std::string& name, const In<std::int32_t>& tokens,
             const In<std::int64_t>& offsets) {
            self.add_external(name, view(tokens), view(offsets));
          },
          "name"_a, "tokens"_a.noconvert(), "offsets"_a.noconvert(), released)
      .def("remove_external", &Corpus::remove_external, "name"_a, released)
      .def("external_names", &Corpus::external_names, released)
      .def("reset", &Corpus::reset, released)
      .def(
          "save",
          [](const Corpus& self, int descriptor) {
            ngram::ByteWriter writer(descriptor);
            self.save(writer);
          },
          "descriptor"_a, released)
      .def(
          "load",
          [](Corpus& self, int descriptor) {
            ngram::ByteReader reader(descriptor);
            self.load(reader);
          },
          "descriptor"_a, released)
      .def("check", &Corpus::check, released)
      .def("num_tokens", &Corpus::num_tokens, released)
      .def("num_bytes", &Corpus::num_bytes, released)
      .def("counters", &Corpus::counters, released);
}
