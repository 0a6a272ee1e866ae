// The Python face of Corpus. Arrays arrive checked by corpus.py; every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "byte_stream.h"
#include "corpus.h"
#include "external_builder.h"
#include "external_index.h"

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

// A view of a proposal's memory, which it keeps alive.
template <typename T>
auto view_of(std::vector<T> ngram::Proposal::* values) {
  return [values](nb::handle self) {
    std::vector<T>& held = nb::cast<ngram::Proposal&>(self).*values;
    return Out<T>(held.data(), {held.size()}, self);
  };
}

// An external corpus that nothing can see any more.
struct Withdrawn {
  std::unique_ptr<ngram::ExternalIndex> index;
};

}  // namespace

NB_MODULE(_ext, m) {
  using ngram::Corpus;
  using ngram::ExternalBuilder;
  const auto released = nb::call_guard<nb::gil_scoped_release>();

  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    }
  });

  nb::class_<Withdrawn>(m, "Withdrawn")
      .def("free", [](Withdrawn& self) { self.index.reset(); }, released);

  nb::class_<ngram::Proposal>(m, "Proposal", R"(Draft nodes of a batch, flat, without the roots.

Entry b owns nodes ``[offsets_B1[b], offsets_B1[b + 1])``, best first, so a prefix of an entry
is the best tree of that size. Within an entry tree node 0 is the root (the last committed
token, not stored) and its node j, from 0, is tree node j + 1; parents come before children.
Each array is a view of the proposal's own memory.)")
      .def("__len__", [](const ngram::Proposal& self) { return self.tokens.size(); })
      .def_prop_ro("offsets_B1", view_of(&ngram::Proposal::offsets), "int64 ``(B + 1,)``.")
      .def_prop_ro("tokens_N", view_of(&ngram::Proposal::tokens), "int32 ``(N,)``.")
      .def_prop_ro("parents_N", view_of(&ngram::Proposal::parents),
                   "int32 ``(N,)``, in tree numbering within the entry.")
      .def_prop_ro("depths_N", view_of(&ngram::Proposal::depths), "int32 ``(N,)``; the root has 0.")
      .def_prop_ro("masks_N", view_of(&ngram::Proposal::masks),
                   "uint64 ``(N,)``; bit k: tree node k is on the path, the node itself and the "
                   "root included.")
      .def_prop_ro("probabilities_N", view_of(&ngram::Proposal::probabilities),
                   "float32 ``(N,)``: estimated probability that the node is accepted.")
      .def_prop_ro(
          "sources_N", view_of(&ngram::Proposal::sources),
          "uint8 ``(N,)``, a `Source` each: where the longest match that proposes the node "
          "was found.");

  auto corpus = nb::class_<Corpus>(m, "Corpus");

  nb::class_<ExternalBuilder>(m, "ExternalBuilder")
      .def(
          "__init__",
          [](ExternalBuilder* self, const Corpus& corpus) {
            new (self) ExternalBuilder(corpus.external_budget());
          },
          "corpus"_a)
      .def(
          "append",
          [](ExternalBuilder& self, const In<std::int32_t>& tokens,
             const In<std::int64_t>& offsets) { self.append(view(tokens), view(offsets)); },
          "tokens"_a.noconvert(), "offsets"_a.noconvert(), released)
      .def(
          "build",
          [](ExternalBuilder& self, const std::function<bool()>& proceed) {
            const nb::gil_scoped_release release;
            return self.build(proceed);
          },
          "proceed"_a)
      .def("cancel", &ExternalBuilder::cancel)
      .def("free", &ExternalBuilder::free, released)
      .def("num_tokens", &ExternalBuilder::num_tokens)
      .def("num_bytes", &ExternalBuilder::num_bytes)
      .def("fraction_indexed", &ExternalBuilder::fraction_indexed);

  corpus
      .def(
          "__init__",
          [](Corpus* self, std::uint64_t max_bytes, std::uint64_t max_external_bytes,
             std::uint32_t max_candidates, std::uint32_t max_steps, const std::string& vocabulary,
             std::int64_t vocab_size) {
            new (self) Corpus(ngram::Options{max_bytes, max_external_bytes, max_candidates,
                                             max_steps, vocabulary, vocab_size});
          },
          nb::kw_only(), "max_bytes"_a, "max_external_bytes"_a, "max_candidates"_a, "max_steps"_a,
          "vocabulary"_a, "vocab_size"_a)
      .def(
          "insert",
          [](Corpus& self, const In<std::int32_t>& tokens, std::optional<std::uint64_t> group) {
            self.insert(view(tokens), group);
          },
          "tokens"_a.noconvert(), "group"_a.none(), released)
      .def(
          "open",
          [](Corpus& self, std::int64_t sequence_id, std::uint64_t group,
             const In<std::int32_t>& tokens,
             std::uint32_t age) { self.open(sequence_id, group, view(tokens), age); },
          "sequence_id"_a, "group"_a, "tokens"_a.noconvert(), "age"_a, released)
      .def(
          "extend",
          [](Corpus& self, const In<std::int64_t>& sequence_ids, const In<std::int32_t>& tokens,
             const In<std::int64_t>& offsets, const std::optional<In<std::int32_t>>& verified,
             std::uint32_t age) {
            self.extend(view(sequence_ids), view(tokens), view(offsets),
                        verified ? std::optional(view(*verified)) : std::nullopt, age);
          },
          "sequence_ids"_a.noconvert(), "tokens"_a.noconvert(), "offsets"_a.noconvert(),
          "verified"_a.noconvert().none(), "age"_a, released)
      .def(
          "propose",
          [](Corpus& self, const In<std::int64_t>& sequence_ids, const In<std::int32_t>& budgets,
             double min_probability) {
            return self.propose(view(sequence_ids), view(budgets), min_probability);
          },
          "sequence_ids"_a.noconvert(), "budgets"_a.noconvert(), "min_probability"_a, released)
      .def(
          "query",
          [](Corpus& self, std::uint64_t group, const In<std::int32_t>& tokens, std::int32_t budget,
             double min_probability) {
            return self.query(group, view(tokens), budget, min_probability);
          },
          "group"_a, "tokens"_a.noconvert(), "budget"_a, "min_probability"_a, released)
      .def("max_sequences", &Corpus::max_sequences)
      .def("close", &Corpus::close, "sequence_id"_a, released)
      .def("set_weight_version", &Corpus::set_weight_version, "version"_a, released)
      .def(
          "add_external",
          [](Corpus& self, const std::string& name, const In<std::int32_t>& tokens,
             const In<std::int64_t>& offsets) {
            self.add_external(name, view(tokens), view(offsets));
          },
          "name"_a, "tokens"_a.noconvert(), "offsets"_a.noconvert(), released)
      .def("publish_external", &Corpus::publish_external, "name"_a, "builder"_a, released)
      .def(
          "withdraw_external",
          [](Corpus& self, const std::string& name) {
            return Withdrawn{self.withdraw_external(name)};
          },
          "name"_a, released)
      .def("remove_external", &Corpus::remove_external, "name"_a, released)
      .def("external_names", &Corpus::external_names, released)
      .def(
          "external_sizes",
          [](const Corpus& self) {
            std::map<std::string, std::tuple<std::uint64_t, std::uint64_t>> sizes;
            for (const auto& [name, size] : self.external_sizes()) {
              sizes.emplace(name, std::tuple(size.num_tokens, size.num_bytes));
            }
            return sizes;
          },
          released)
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
